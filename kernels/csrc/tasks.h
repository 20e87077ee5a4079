// Tasks dealt out to threads.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace dps {

// Tasks in two stages, the first possibly empty. Thread t owns every tasks t, t + threads, ... of a
// stage, so that a layer's weights are read by the same core in every step and stay in its cache; a
// thread that has none left takes others'. Nobody begins the second stage while a task of the first
// is left to take: whoever waits there for a task of the first waits for a thread that runs it.
class Tasks {
 public:
  Tasks(int64_t first_stage, int64_t all)
      : queues_(std::clamp<int64_t>(all, 1, at::get_num_threads())), ends_{first_stage, all} {
    for (int64_t thread = 0; thread < threads(); ++thread) {
      queues_[thread].next[0] = thread;
      queues_[thread].next[1] = first_stage + thread;
    }
  }

  int64_t threads() const { return queues_.size(); }

  // The thread's next task, or -1.
  int64_t claim(int64_t thread) {
    for (int stage = 0; stage < 2; ++stage) {
      for (int64_t i = 0; i < threads(); ++i) {
        auto& next = queues_[(thread + i) % threads()].next[stage];
        if (next.load(std::memory_order_relaxed) >= ends_[stage]) continue;
        const int64_t task = next.fetch_add(threads(), std::memory_order_relaxed);
        if (task < ends_[stage]) return task;
      }
    }
    return -1;
  }

  // Whether the thread may claim a task before it has run another. The last are not claimed ahead: a
  // thread that is still busy would keep them from one that is free.
  bool plenty(int64_t thread) const {
    return queues_[thread].next[1].load(std::memory_order_relaxed) + threads() < ends_[1];
  }

 private:
  struct alignas(64) Queue {
    std::atomic<int64_t> next[2];
  };
  std::vector<Queue> queues_;
  int64_t ends_[2];
};

// Calls `run(task, following)` for all tasks; `following` is what the thread does next, or -1 where
// that is not known.
template <typename Run>
void parallel_tasks(int64_t first_stage, int64_t all, const Run& run) {
  Tasks tasks(first_stage, all);
  at::parallel_for(0, tasks.threads(), 1, [&](int64_t thread, int64_t) {
    for (int64_t task = tasks.claim(thread); task >= 0;) {
      const bool plenty = tasks.plenty(thread);
      const int64_t claimed = plenty ? tasks.claim(thread) : -1;
      run(task, claimed);
      task = plenty ? claimed : tasks.claim(thread);
    }
  });
}

}  // namespace dps
