// A machine of two NUMA nodes for counting devices: nic0 is on node 0, nic1 on node 1. The emulated GPU is
// behind the same switch as nic0.
#pragma once

#include <string>

#include "sysfs_tree.h"
#include "transports/verbs/sysfs.h"

// While this object lives, this process finds that machine in /sys.
class NearMachine {
 public:
  NearMachine() { kvxfer::verbs::sysfs::replace_root(root_.c_str()); }
  ~NearMachine() { kvxfer::verbs::sysfs::replace_root(nullptr); }

 private:
  static std::string nic(const std::string& name, const std::string& path, int node) {
    const std::string own = "$" + name, device = own + "/infiniband/" + name;
    return own + " = " + path + "\n" + own + "/numa_node = " + std::to_string(node) + "\n" +
           "class/infiniband/" + name + " -> " + device + "\n" + device + "/device -> " + own + "\n" +
           device + "/node_type = 1: CA\n" + device + "/ports/1/state = 4: ACTIVE\n" + device +
           "/ports/1/link_layer = Ethernet\n";
  }

  const SysfsTree tree_{
      "devices/system/node/node0/distance = 10 21\n"
      "devices/system/node/node1/distance = 21 10\n" +
      nic("nic0", "devices/pci0000:00/0000:00:01.0/0000:01:00.0", 0) +
      nic("nic1", "devices/pci0000:80/0000:80:01.0/0000:81:00.0", 1) +
      "$gpu = devices/pci0000:00/0000:00:01.0/0000:00:00.0\n"
      "$gpu/numa_node = 0\n"
      "$gpu/vendor = 0x10de\n"
      "$gpu/class = 0x030200\n"
      "bus/pci/devices/0000:00:00.0 -> $gpu\n"};
  const std::string root_ = tree_.root();
};
