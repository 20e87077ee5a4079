// Tasks dealt out to threads.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace dps {

// Tasks in two stages, the first possibly empty. Thread t owns tasks t, t + threads, ... of a
// stage, so that a layer's weights are read by the same core in every step and stay in its cache; a
// thread that has none left takes others'. Nobody takes a task of the second stage while one of the
// first is left: whoever waits there for a task of the first waits for a thread that runs it.
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

  // As claim, before the thread has run another, of its own tasks; -1 near the end of a stage: a
  // thread that is still busy would keep its last task from one that is free.
  int64_t claim_ahead(int64_t thread) {
    const int stage = left(0) ? 0 : 1;
    auto& next = queues_[thread].next[stage];
    if (next.load(std::memory_order_relaxed) + threads() >= ends_[stage]) return -1;
    const int64_t task = next.fetch_add(threads(), std::memory_order_relaxed);
    return task < ends_[stage] ? task : -1;
  }

 private:
  bool left(int stage) const {
    return std::any_of(queues_.begin(), queues_.end(), [&](const Queue& queue) {
      return queue.next[stage].load(std::memory_order_relaxed) < ends_[stage];
    });
  }

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
      const int64_t following = tasks.claim_ahead(thread);
      run(task, following);
      task = following >= 0 ? following : tasks.claim(thread);
    }
  });
}

}  // namespace dps
