/* Giving up the processor takes a tenth of a millisecond here, and so does asking for news that is none. See yields.py.
 */
#define _GNU_SOURCE
#include <sys/epoll.h>
#include <time.h>

static void sleep_shortly(void) {
  const struct timespec moment = {0, 100000};
  nanosleep(&moment, 0);
}

int sched_yield(void) {
  sleep_shortly();
  return 0;
}

int epoll_wait(int fd, struct epoll_event* events, int most, int timeout) {
  enum { OFTEN = 8 };
  static __thread struct epoll_event last;
  static __thread int again; /* how often in a row the answer was one event, and the same one */

  if (again >= OFTEN) sleep_shortly();
  const int found = epoll_pwait(fd, events, most, timeout, 0);
  const int same = found == 1 && events->events == last.events && events->data.u64 == last.data.u64;
  again = same ? again + 1 : 0;
  if (found == 1) last = *events;
  return found;
}
