// The thread pool: one pinned thread per CPU, the caller being one of them, and barriers inside a run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace caudal {

// A non-owning reference to a callable void(Arg).
template <typename Arg>
class FunctionRef {
 public:
  template <typename F>
  FunctionRef(F& f)  // NOLINT: implicit on purpose
      : object_(&f), call_([](void* o, Arg arg) { (*static_cast<F*>(o))(arg); }) {}
  void operator()(Arg arg) const { call_(object_, arg); }

 private:
  void* object_;
  void (*call_)(void*, Arg);
};

class ThreadPool;

// One thread's part in a run.
class Member {
 public:
  int thread() const { return thread_; }  // 0 .. size - 1, names the thread's scratch memory
  int active() const { return active_; }  // threads that take part in this run
  // Waits until all active threads have arrived.
  void barrier();

 private:
  friend class ThreadPool;
  ThreadPool* pool_ = nullptr;
  int thread_ = 0;
  int active_ = 1;
  uint64_t wait_ns_ = 0;       // time spent in barriers of this run
  uint64_t preempted_ns_ = 0;  // of it, in waits so long that a thread must have lost its CPU
};

// Waiting threads spin for some microseconds and then sleep, so an idle or blocked pool costs no CPU.
//
// A thread whose CPU is taken by another process makes all the others wait at every barrier. The pool watches
// the waiting times, and benches a thread that is repeatedly late: it sleeps, runs go on without it, and
// after a while it gets another try. Results never depend on which threads take part.
class ThreadPool {
 public:
  // num_threads >= 1. With `pin`, thread i is bound to the i-th CPU this process may use; the caller only
  // while it is inside run(), so that nothing outside inherits the binding. Throws std::runtime_error where
  // the system does not give that many threads.
  ThreadPool(int num_threads, bool pin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }
  // May be asked while a run is in progress.
  int num_benched() const { return num_benched_.load(std::memory_order_relaxed); }

  // Runs body(member) on the active threads and returns when all have finished. One caller at a time. The
  // body must not throw and must pass the same barriers on every thread. Throws std::runtime_error in a
  // forked child, where the threads do not exist.
  void run(FunctionRef<Member&> body);

 private:
  friend class Member;
  struct alignas(64) Slot {
    Member member;
    bool participates = true;                 // known to the caller only
    std::atomic<uint32_t> assigned_epoch{0};  // the run that this thread takes part in
    int strikes = 0;
    uint64_t bench_until = 0;  // ns; 0: active
    uint64_t penalty = 0;      // ns, doubles with each return to the bench
    uint64_t returned_at = 0;
  };

  void worker(int thread);
  void stop_and_join();
  void bind(int thread) const;
  void choose_participants(uint64_t now);
  void judge(uint64_t start, uint64_t end);

  const int num_threads_;
  const bool pin_;
  const int owner_pid_;
  std::vector<int> cpus_;
  std::unique_ptr<Slot[]> slots_;
  std::vector<std::thread> threads_;
  const FunctionRef<Member&>* body_ = nullptr;

  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> remaining_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> num_benched_{0};
};

}  // namespace caudal
