// A thread pool: helpers take parts of the calling thread's job, and sleep between jobs.
//
// A caller publishes a job, wakes the helpers and takes parts of it itself. At the end it waits only for helpers that
// have begun a part; it then sleeps, so that its processor is free for a helper that was preempted. A helper that joins
// late, or never, costs nothing. There is one job at a time: a caller that finds the pool in use computes alone.
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "abi.h"

namespace {

constexpr int kMaxHelpers = 255;
constexpr int kPatience = 500;  // polls before sleeping: some microseconds

struct Pool {
  int busy;      // 1: a caller uses the pool
  int open;      // 1: helpers may join the job
  int active;    // number of helpers that may be working on it
  int waiting;   // 1: the caller may sleep on `active`
  int published; // number of jobs so far; idle helpers sleep on it
  int wanted;    // number of helpers that may join jobs
  int started;
  i64 next, count, grain;
  Work work;
  void* context;
};

Pool pool;
pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

void sleep_on(int* word, int value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
void wake(int* word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

template <class N>
N get(const N* p) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
template <class N>
void put(N* p, N value) {
  __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void take_parts() {
  for (;;) {
    i64 begin = __atomic_fetch_add(&pool.next, pool.grain, __ATOMIC_SEQ_CST);
    if (begin >= pool.count) return;
    i64 end = begin + pool.grain < pool.count ? begin + pool.grain : pool.count;
    pool.work(pool.context, begin, end);
  }
}

void* help(void* argument) {
  int number = (int)(intptr_t)argument, seen = 0;
  for (;;) {
    for (int i = 0; i < kPatience && get(&pool.published) == seen; i++) pause_briefly();
    if (get(&pool.published) == seen) sleep_on(&pool.published, seen);
    seen = get(&pool.published);
    if (number >= get(&pool.wanted)) continue;
    __atomic_fetch_add(&pool.active, 1, __ATOMIC_SEQ_CST);
    if (get(&pool.open)) take_parts();  // not open: the job is over, and its data may be gone
    if (__atomic_sub_fetch(&pool.active, 1, __ATOMIC_SEQ_CST) == 0 && get(&pool.waiting)) wake(&pool.active, 1);
  }
  return nullptr;
}

// Resets the pool in the child of a fork, which has no helpers and no running job.
void forget_all() {
  pool = Pool{};
  pthread_mutex_init(&starting, nullptr);
}

}  // namespace

// Sets the number of computing threads, the caller included. Returns the number that could be started.
extern "C" __attribute__((visibility("default"))) i64 ballast_set_threads(i64 count) {
  int helpers = count < 1 ? 0 : count - 1 > kMaxHelpers ? kMaxHelpers : (int)count - 1;
  pthread_mutex_lock(&starting);
  static bool prepared = false;
  if (!prepared) pthread_atfork(nullptr, nullptr, forget_all);
  prepared = true;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  while (pool.started < helpers) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, help, (void*)(intptr_t)pool.started) != 0) break;
    pool.started++;
  }
  pthread_attr_destroy(&attributes);
  put(&pool.wanted, helpers < pool.started ? helpers : pool.started);
  i64 result = pool.wanted + 1;
  pthread_mutex_unlock(&starting);
  return result;
}

extern "C" __attribute__((visibility("hidden"))) void ballast_parallel(i64 count, i64 grain, Work work, void* context) {
  int helpers = get(&pool.wanted);
  i64 parts = (count + grain - 1) / grain;
  if (helpers == 0 || parts < 2 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_SEQ_CST)) {
    work(context, 0, count);
    return;
  }
  pool.work = work, pool.context = context, pool.count = count, pool.grain = grain;
  put(&pool.next, (i64)0);
  put(&pool.open, 1);
  __atomic_fetch_add(&pool.published, 1, __ATOMIC_SEQ_CST);
  wake(&pool.published, parts - 1 < helpers ? (int)parts - 1 : helpers);
  take_parts();
  put(&pool.open, 0);
  for (int i = 0; i < kPatience && get(&pool.active); i++) pause_briefly();
  put(&pool.waiting, 1);
  for (int active = get(&pool.active); active; active = get(&pool.active)) sleep_on(&pool.active, active);
  put(&pool.waiting, 0);
  put(&pool.busy, 0);
}
