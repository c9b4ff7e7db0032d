// A made-up /sys in a folder of its own, from a text with a line for each file and link:
//
//   # A comment.
//   $nic = devices/pci0000:15/0000:15:01.0/0000:18:00.0      a name for the rest of the text
//   $nic/numa_node = 0                                       a file
//   class/infiniband/mlx5_0 -> $nic/infiniband/mlx5_0        a link, made relative as the kernel's are
//
// Folders come into being with what they hold, and with links that lead to them.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

class SysfsTree {
 public:
  explicit SysfsTree(const std::string& text = {}) {
    // In memory: hundreds of small files take seconds on a disk.
    const bool has_shm = ::access("/dev/shm", W_OK) == 0;
    std::string folder =
        (has_shm ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path()) /
        "kvxfer-sysfs-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no temporary folder");
    root_ = folder;
    add(text);
  }
  SysfsTree(const SysfsTree&) = delete;
  SysfsTree& operator=(const SysfsTree&) = delete;
  ~SysfsTree() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  // Of a file beside the test: tests/native/topology/NAME.txt.
  static std::string fixture(const std::string& name) {
    std::ifstream file(std::string(KVXFER_TOPOLOGIES) + "/" + name + ".txt");
    if (!file) throw std::runtime_error("no fixture " + name);
    return (std::ostringstream() << file.rdbuf()).str();
  }

  // What is there already is replaced.
  void add(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '#') continue;
      const std::size_t link = line.find(" -> "), file = line.find(" = ");
      if (link != std::string::npos)
        add_link(expanded(line.substr(0, link)), expanded(line.substr(link + 4)));
      else if (file == std::string::npos)
        throw std::runtime_error("neither a file nor a link: " + line);
      else if (line[0] == '$' && line.find('/') > file)
        names_[line.substr(1, file - 1)] = expanded(line.substr(file + 3));
      else
        add_file(expanded(line.substr(0, file)), line.substr(file + 3));
    }
  }
  void remove(const std::string& path) { std::filesystem::remove_all(root_ / expanded(path)); }

  std::string root() const { return root_.string(); }

 private:
  std::string expanded(const std::string& path) const {
    if (path.empty() || path[0] != '$') return path;
    const std::size_t end = path.find('/');
    const auto found = names_.find(path.substr(1, end == std::string::npos ? end : end - 1));
    if (found == names_.end()) throw std::runtime_error("no name was given before: " + path);
    return found->second + (end == std::string::npos ? "" : path.substr(end));
  }

  void add_file(const std::string& path, const std::string& content) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path, std::ios::trunc) << content << "\n";
  }

  void add_link(const std::string& path, const std::string& target) {
    const std::filesystem::path link = root_ / path;
    std::filesystem::create_directories(link.parent_path());
    std::filesystem::create_directories(root_ / target);
    std::filesystem::remove(link);
    std::filesystem::create_symlink((root_ / target).lexically_relative(link.parent_path()), link);
  }

  std::filesystem::path root_;
  std::map<std::string, std::string> names_;
};
