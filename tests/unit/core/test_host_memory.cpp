#include "device/memory.h"
#include "support/catch.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("a host has the memory that nobody else has now") {
  const TemporaryFolder root;
  const int64_t total = host_memory(root.path()).total;
  CHECK(host_memory(root.path()).available == total);  // as far as one can see
  root.write("proc/meminfo", "MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:       5 kB\n");
  CHECK(host_memory(root.path()).available == 5 * 1024);
  CHECK(host_memory(root.path()).total == total);
}

TEST_CASE("a container's limit of memory counts where it is less than the host has") {
  const TemporaryFolder root;
  root.write("proc/meminfo", "MemAvailable:  100 kB\n");
  root.write("proc/self/cgroup", "0::/slurm/job_7/task_0\n");
  root.write("sys/fs/cgroup/slurm/job_7/task_0/memory.max", "max\n");
  CHECK(host_memory(root.path()).available == 102400);
  root.write("sys/fs/cgroup/slurm/job_7/memory.max", "200000\n");  // of the whole job
  CHECK(host_memory(root.path()).available == 102400);
  CHECK(host_memory(root.path()).total == 200000);
  root.write("sys/fs/cgroup/slurm/memory.max", "50000\n");
  CHECK(host_memory(root.path()).available == 50000);
  CHECK(host_memory(root.path()).total == 50000);
}

TEST_CASE("so does one of the older control groups of memory, whose path is the host's") {
  const TemporaryFolder root;
  root.write("proc/meminfo", "MemAvailable:  100 kB\n");
  root.write("proc/self/cgroup", "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(host_memory(root.path()).available == 102400);
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "70000\n");
  CHECK(host_memory(root.path()).available == 70000);
}
