// Reads small files and links of sysfs. None of its functions fails: what cannot be read is empty. A device
// may go during a read, a container may hide half of the tree, and a driver may leave out any attribute.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvxfer::verbs::sysfs {

// Where sysfs is: "/sys", or a test's own folder. The text stays the test's.
const char* root() noexcept;
void replace_root(const char* other) noexcept;  // null: "/sys" again

// The first line, without the spaces around it; "" where it cannot be read. An attribute has a page at most.
std::string read_line(const std::string& path);

// The number that the first line begins with, e.g. 4 of "4: ACTIVE"; base 0 takes 0x for hexadecimal.
std::optional<std::int64_t> read_number(const std::string& path, int base = 10);

// The names in a folder, in natural order ("mlx5_2" before "mlx5_10"), without those that begin with a dot.
std::vector<std::string> names_in(const std::string& folder);

// The number of a thing that sysfs numbers: a port, or a row of a table.
std::optional<int> index_of(std::string_view name) noexcept;

bool exists(const std::string& path);

// The parts of the path, outermost first, with every link followed. Empty where the path leads nowhere or in
// a circle.
std::vector<std::string> resolve(const std::string& path);

// Compares runs of digits as numbers.
bool natural_less(std::string_view left, std::string_view right) noexcept;

}  // namespace kvxfer::verbs::sysfs
