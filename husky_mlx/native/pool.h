// The threads of one library. They sleep between calls, share out the work of each phase unit by
// unit (a core that something else keeps busy then takes fewer), and meet at a barrier after it.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>

#include "lanes.h"

namespace husky {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  static constexpr int MAX_THREADS = 256;
  using Job = void (*)(void* context, int thread);

  // Runs job(context, thread) on all threads, the caller being thread 0. One call at a time.
  void run(Job job, void* context) {
    job_ = job;
    context_ = context;
    units_taken_.store(0, std::memory_order_relaxed);
    pthread_mutex_lock(&sleep_);
    call_.fetch_add(1, std::memory_order_release);
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&sleep_);
    job(context, 0);
    barrier();
  }

  // Called by every thread of a job: f(unit) for each unit once, then a barrier.
  template <typename F>
  void each(int units, F f) {
    for (;;) {
      const int unit = units_taken_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) break;
      f(unit);
    }
    barrier();
  }

  int threads() const { return threads_; }

  // Returns false where the system gives no thread.
  bool start(int threads) {
    if (threads == threads_) return true;
    stop();
    threads_ = 1;
    stopping_ = false;
    // Python's signal handlers belong to its main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (int i = 1; i < threads; ++i) {
      starts_[i] = {this, i, call_.load(std::memory_order_relaxed)};
      if (pthread_create(&handles_[i], nullptr, enter, &starts_[i]) != 0) break;
      threads_ = i + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return threads_ == threads;
  }

  // In a forked child: its threads and who held its locks are gone.
  void forget() {
    threads_ = 0;
    arrived_.store(0);
    sleep_ = PTHREAD_MUTEX_INITIALIZER;
    wake_ = PTHREAD_COND_INITIALIZER;
  }

 private:
  struct Start {
    Pool* pool;
    int thread;
    uint32_t call;
  };

  // In pauses of 10 to 60 ns. Between two tokens Python needs less than the first; a thread that is
  // not at the barrier after the second was probably put off its core.
  static constexpr int SPINS_BEFORE_SLEEP = 4000, SPINS_BEFORE_YIELD = 500;

  void stop() {
    pthread_mutex_lock(&sleep_);
    stopping_ = true;
    call_.fetch_add(1, std::memory_order_release);
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&sleep_);
    for (int i = 1; i < threads_; ++i) pthread_join(handles_[i], nullptr);
    threads_ = 0;
  }

  static void* enter(void* argument) {
    const Start start = *static_cast<Start*>(argument);
    start.pool->serve(start.thread, start.call);
    return nullptr;
  }

  void serve(int thread, uint32_t seen) {
    for (;;) {
      for (int i = 0; i < SPINS_BEFORE_SLEEP && call_.load(std::memory_order_acquire) == seen; ++i)
        pause();
      if (call_.load(std::memory_order_acquire) == seen) {
        pthread_mutex_lock(&sleep_);
        while (call_.load(std::memory_order_acquire) == seen) pthread_cond_wait(&wake_, &sleep_);
        pthread_mutex_unlock(&sleep_);
      }
      ++seen;
      if (stopping_) return;
      job_(context_, thread);
      barrier();
    }
  }

  void barrier() {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      units_taken_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int i = 0; phase_.load(std::memory_order_acquire) == phase; ++i) {
      pause();
      // Where there are more threads than free cores, the one that is waited for needs this one's.
      if (i >= SPINS_BEFORE_YIELD) sched_yield();
    }
  }

  alignas(64) std::atomic<int> units_taken_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<uint32_t> call_{0};
  Job job_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  bool stopping_ = false;
  pthread_mutex_t sleep_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  pthread_t handles_[MAX_THREADS];
  Start starts_[MAX_THREADS];
};

}  // namespace husky
