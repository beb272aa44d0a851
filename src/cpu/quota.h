/* The quota of a cgroup, by which Linux limits the CPU time of a container. */
#pragma once

#include <stdint.h>

/* CPUs that the quotas of this process's cgroup and its ancestors allow, rounded up; INT32_MAX
 * without a quota. membership: as /proc/self/cgroup; mount: as /sys/fs/cgroup. */
int32_t fdma_quota_cpus(const char *membership, const char *mount);
