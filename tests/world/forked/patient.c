// Open MPI waits for other ranks by sched_yield() in a loop, which takes a quarter of all time from ranks that compute
// where several share a core. Forked ranks sleep a moment instead; ranks that start cold do not.
#include <sched.h>
#include <time.h>

int sched_yield(void) {
  const struct timespec moment = {0, 20000};
  nanosleep(&moment, 0);
  return 0;
}
