// Open MPI waits for other ranks by calling sched_yield() in a loop, which costs a quarter of the CPU time when several
// ranks share a core. Forked ranks sleep 0.1 ms instead. Cold ranks do not load this library.
#include <sched.h>
#include <time.h>

int sched_yield(void) {
  const struct timespec moment = {0, 100000};
  nanosleep(&moment, 0);
  return 0;
}
