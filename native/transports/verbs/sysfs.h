// Small files and links of sysfs, read so that nothing of them is an error: what cannot be read is empty. A device may
// go while it is looked at, a container may hide half of the tree, and a driver may leave out any attribute.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvxfer::verbs::sysfs {

// Where it is: "/sys", or what a test has put in its place. The text is the test's.
const char* root() noexcept;
void replace_root(const char* other) noexcept;  // null: no more

// The first line, without the spaces around it; "" where it cannot be read. An attribute has a page at most.
std::string read_line(const std::string& path);

// The number that the first line begins with, e.g. 4 of "4: ACTIVE"; base 0 takes 0x for hexadecimal.
std::optional<std::int64_t> read_number(const std::string& path, int base = 10);

// Of a folder, in natural order ("mlx5_2" before "mlx5_10"), without those that begin with a dot.
std::vector<std::string> names_in(const std::string& folder);

// Of what sysfs numbers: ports, rows of a table.
std::optional<int> index_of(std::string_view name) noexcept;

bool exists(const std::string& path);

// The parts of the path, outermost first, with every link followed; none where it leads nowhere, or in a circle.
std::vector<std::string> resolve(const std::string& path);

// Runs of digits count as numbers.
bool natural_less(std::string_view left, std::string_view right) noexcept;

}  // namespace kvxfer::verbs::sysfs
