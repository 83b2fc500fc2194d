// The library's one engine: its threads, its memory and the lock that lets one call in at a time.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "forward.h"

namespace husky {

enum Result : int { DONE = 0, BAD_CALL = 1, NO_THREADS = 2, NO_MEMORY = 3 };

template <typename Shape>
class Engine {
 public:
  int run(const Call& call, int threads) {
    if (!sound(call) || threads < 1 || threads > Pool::MAX_THREADS) return BAD_CALL;
    notice_fork();
    pthread_mutex_lock(&calls_);
    const int result = prepare(threads);
    if (result == DONE) {
      call_ = &call;
      pool_.run([](void* engine, int thread) { static_cast<Engine*>(engine)->run_thread(thread); },
                this);
    }
    pthread_mutex_unlock(&calls_);
    return result;
  }

 private:
  static bool sound(const Call& call) {
    if (call.count < 1 || call.count > Shape::BLOCK) return false;
    if (call.wanted != 0 && call.wanted != 1 && call.wanted != call.count) return false;
    for (int i = 0; i < call.count; ++i)
      if (call.tokens[i] < 0 || call.tokens[i] >= Shape::Embedding::ROWS) return false;
    for (int i = 0; i < Shape::LAYERS; ++i) {
      const CacheRows& cache = call.caches[i];
      if (cache.slot < 0 || cache.slot + call.count > cache.capacity) return false;
      if (cache.live < call.count || cache.live > cache.capacity || cache.window < 1) return false;
      // Only in a single token's attention may rows be in another order than their tokens.
      if (call.count > 1 && cache.slot + call.count != cache.live) return false;
    }
    return true;
  }

  // A forked child has none of the threads, and locks that nobody will release. The first of its
  // own threads to come makes them anew; `process_` is negative meanwhile.
  void notice_fork() {
    const int own = (int)getpid();
    int known = process_.load();
    while (known != own) {
      if (known != -own && process_.compare_exchange_strong(known, -own)) {
        calls_ = PTHREAD_MUTEX_INITIALIZER;
        pool_.forget();
        process_.store(own);
        return;
      }
      sched_yield();
      known = process_.load();
    }
  }

  int prepare(int threads) {
    if (!pool_.start(threads)) return NO_THREADS;
    if (arena_threads_ == threads) return DONE;
    if (arena_ != nullptr) munmap(arena_, arena_bytes_);
    arena_bytes_ = Arena<Shape>::bytes(threads);
    void* memory =
        mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const bool failed = memory == MAP_FAILED;
    arena_ = failed ? nullptr : static_cast<char*>(memory);
    arena_threads_ = failed ? 0 : threads;
    return failed ? NO_MEMORY : DONE;
  }

  void run_thread(int thread) { Forward<Shape>(pool_, arena_, *call_, thread).run(); }

  Pool pool_;
  pthread_mutex_t calls_ = PTHREAD_MUTEX_INITIALIZER;
  std::atomic<int> process_{0};
  const Call* call_ = nullptr;
  char* arena_ = nullptr;
  int64_t arena_bytes_ = 0;
  int arena_threads_ = 0;
};

}  // namespace husky
