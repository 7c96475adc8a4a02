#include "core/cores.h"

#include <sched.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

using namespace invar;
using namespace invar::test;

TEST_CASE("cores are those that the process is bound to") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof(before), &before) == 0);
  CHECK(count(bound_cores()) == CPU_COUNT(&before));
  size_t first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
  const CoreSet bound = bound_cores();
  sched_setaffinity(0, sizeof(before), &before);
  CHECK(count(bound) == 1);
  CHECK(bound[first / 64] == uint64_t{1} << first % 64);
}

TEST_CASE("a container's quota of CPU time counts as fewer cores") {
  const TemporaryFolder root;
  CHECK(within_quota(16, root.path()) == 16);  // no control groups
  root.write("proc/self/cgroup", "0::/slurm/job_7/task_0\n");
  CHECK(within_quota(16, root.path()) == 16);
  root.write("sys/fs/cgroup/slurm/cpu.max", "max 100000\n");
  CHECK(within_quota(16, root.path()) == 16);
  root.write("sys/fs/cgroup/slurm/job_7/cpu.max", "450000 100000\n");
  CHECK(within_quota(16, root.path()) == 4);
  CHECK(within_quota(2, root.path()) == 2);
  root.write("sys/fs/cgroup/slurm/job_7/task_0/cpu.max", "50000 100000\n");
  CHECK(within_quota(16, root.path()) == 1);
}

TEST_CASE("so does one of the older control groups, whose path is the host's") {
  const TemporaryFolder root;
  root.write("proc/self/cgroup", "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  CHECK(within_quota(16, root.path()) == 16);
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "600000\n");
  CHECK(within_quota(16, root.path()) == 6);
}
