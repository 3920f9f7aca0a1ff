#include "core/pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace caudal {
namespace {

// Spinning covers the usual skew between threads; a futex wake-up costs about 10 us, so a barrier that sleeps
// is dear, and one that spins for long steals time from whoever has to arrive.
constexpr int kSpinRounds = 40;  // of kPausesPerRound pauses and one yield: about 50 us
constexpr int kPausesPerRound = 40;

constexpr uint64_t kMinJudgedRun = 200'000;  // ns; shorter runs say nothing
constexpr uint64_t kPreempted = 500'000;     // ns; waiting as long as this is for a thread that lost its CPU
constexpr double kLateFraction = 0.30;       // of a run lost in waiting for such threads
constexpr int kStrikes = 2;
constexpr uint64_t kFirstPenalty = 500'000'000;      // ns
constexpr uint64_t kLongestPenalty = 1'600'000'000;  // ns
constexpr uint64_t kForgive = 2'000'000'000;         // ns of good behaviour

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Waits until the value is no longer `old`: spins, yields, then sleeps.
void await_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int round = 0; round < kSpinRounds; ++round) {
    for (int i = 0; i < kPausesPerRound; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      cpu_relax();
    }
    sched_yield();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
    }
  }
#endif
  if (cpus.empty()) {
    const unsigned n = std::max(1U, std::thread::hardware_concurrency());
    for (unsigned i = 0; i < n; ++i) cpus.push_back(static_cast<int>(i));
  }
  return cpus;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, bool pin)
    : num_threads_(std::max(1, num_threads)),
      pin_(pin),
      owner_pid_(getpid()),
      cpus_(allowed_cpus()),
      slots_(std::make_unique<Slot[]>(static_cast<size_t>(num_threads_))) {
  for (int i = 0; i < num_threads_; ++i) {
    slots_[i].member.pool_ = this;
    slots_[i].member.thread_ = i;
  }
  try {
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error&) {  // those that did start must end before their std::thread objects do
    const size_t started = threads_.size() + 1;
    stop_and_join();
    throw std::runtime_error("the system lets only " + std::to_string(started) + " of " +
                             std::to_string(num_threads_) + " threads start; use fewer");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_pid_) {  // in a forked child the threads do not exist: neither join nor destroy them
    for (auto& t : threads_) t.detach();
    return;
  }
  stop_and_join();
}

void ThreadPool::stop_and_join() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& t : threads_) t.join();
}

void ThreadPool::bind([[maybe_unused]] int thread) const {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus_[static_cast<size_t>(thread) % cpus_.size()], &set);
  sched_setaffinity(0, sizeof set, &set);  // a failure (a shrunk cpuset) only costs speed
#endif
}

void Member::barrier() {
  if (active_ == 1) return;
  ThreadPool& p = *pool_;
  const uint32_t generation = p.generation_.load(std::memory_order_relaxed);
  if (p.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(active_)) {
    p.arrived_.store(0, std::memory_order_relaxed);
    p.generation_.fetch_add(1);  // sequentially consistent: see ThreadPool::run
    p.generation_.notify_all();
    return;
  }
  const uint64_t start = now_ns();
  await_change(p.generation_, generation);
  const uint64_t waited = now_ns() - start;
  wait_ns_ += waited;
  if (waited >= kPreempted) preempted_ns_ += waited;
}

void ThreadPool::worker(int thread) {
  if (pin_) bind(thread);
  Slot& slot = slots_[thread];
  uint32_t seen = 0;
  bool benched = false;
  for (;;) {
    if (benched) {
      epoch_.wait(seen, std::memory_order_acquire);  // no spinning on a CPU that somebody else needs
    } else {
      await_change(epoch_, seen);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    // Nobody waits for a benched thread, so it may wake up when later runs have begun already: the number of
    // the run, not a flag, says whether it takes part.
    benched = slot.assigned_epoch.load(std::memory_order_acquire) != seen;
    if (benched) continue;
    (*body_)(slot.member);
    if (remaining_.fetch_sub(1) == 1) remaining_.notify_all();
  }
}

void ThreadPool::choose_participants(uint64_t now) {
  int active = 0;
  for (int i = 0; i < num_threads_; ++i) {
    Slot& s = slots_[i];
    if (s.bench_until != 0 && now >= s.bench_until) {
      s.bench_until = 0;
      s.strikes = 0;
      s.returned_at = now;
      num_benched_.fetch_sub(1, std::memory_order_relaxed);
    }
    s.participates = s.bench_until == 0;
    active += s.participates;
  }
  for (int i = 0; i < num_threads_; ++i) {
    slots_[i].member.active_ = active;
    slots_[i].member.wait_ns_ = 0;
    slots_[i].member.preempted_ns_ = 0;
  }
}

// After a run. The other process may move from CPU to CPU within it, to the one whose thread just waits, so
// that every thread is late in turn: what counts is all the waiting. Whoever waited least was waited for
// most.
void ThreadPool::judge(uint64_t start, uint64_t end) {
  if (end - start < kMinJudgedRun) return;
  int latest = -1, active = 0;
  uint64_t waited = 0;
  for (int i = 0; i < num_threads_; ++i) {
    if (!slots_[i].participates) continue;
    ++active;
    waited += slots_[i].member.preempted_ns_;
    if (latest < 0 || slots_[i].member.wait_ns_ < slots_[latest].member.wait_ns_) latest = i;
  }
  if (active < 2) return;
  Slot& s = slots_[latest];
  const double lost = static_cast<double>(waited) / (active - 1);  // all others wait for a late one
  if (lost < kLateFraction * static_cast<double>(end - start)) {
    for (int i = 0; i < num_threads_; ++i) {
      if (slots_[i].participates) slots_[i].strikes = 0;
    }
    if (s.penalty != 0 && end - s.returned_at > kForgive) s.penalty = 0;
    return;
  }
  if (++s.strikes < kStrikes) return;
  s.penalty = s.penalty == 0 ? kFirstPenalty : std::min(2 * s.penalty, kLongestPenalty);
  s.bench_until = end + s.penalty;
  num_benched_.fetch_add(1, std::memory_order_relaxed);
}

void ThreadPool::run(FunctionRef<Member&> body) {
  if (getpid() != owner_pid_) {
    throw std::runtime_error("the model was loaded before a fork; load it in the process that uses it");
  }
  if (num_threads_ == 1) {
    slots_[0].member.active_ = 1;
    body(slots_[0].member);
    return;
  }
  const uint64_t start = now_ns();
  choose_participants(start);
  const bool caller_participates = slots_[0].participates;
  const uint32_t workers = static_cast<uint32_t>(slots_[0].member.active_) - (caller_participates ? 1 : 0);
  body_ = &body;
  if (workers != 0) {
    remaining_.store(workers, std::memory_order_relaxed);
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    for (int i = 1; i < num_threads_; ++i) {
      if (slots_[i].participates) slots_[i].assigned_epoch.store(epoch, std::memory_order_release);
    }
    // Sequentially consistent, not just a release: notify_all() makes no system call where it sees no
    // sleeper, and that look must not overtake the store, or a thread that falls asleep just now is never
    // woken.
    epoch_.store(epoch);
    epoch_.notify_all();
  }
  if (caller_participates) {
#ifdef __linux__
    cpu_set_t before;
    const bool restore = pin_ && sched_getaffinity(0, sizeof before, &before) == 0;
    if (restore) bind(0);
    body(slots_[0].member);
    if (restore) sched_setaffinity(0, sizeof before, &before);
#else
    body(slots_[0].member);
#endif
  }
  for (uint32_t left = remaining_.load(std::memory_order_acquire); workers != 0 && left != 0;
       left = remaining_.load(std::memory_order_acquire)) {
    await_change(remaining_, left);
  }
  judge(start, now_ns());
}

}  // namespace caudal
