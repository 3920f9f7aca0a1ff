#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "core/pool.h"
#include "tables.h"

using caudal::Member;
using caudal::Region;
using caudal::ThreadPool;

TEST_CASE("every thread runs every phase, and no thread passes a barrier early") {
  for (const int size : {1, 2, 3, 5}) {
    ThreadPool pool(size, false);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> done(20);
      std::atomic<int> early{0};
      auto body = [&](Member& m) {
        for (size_t phase = 0; phase < done.size(); ++phase) {
          done[phase].fetch_add(1);
          m.barrier();
          if (done[phase].load() != m.active()) early.fetch_add(1);
        }
      };
      pool.run(body);
      CHECK(early.load() == 0);
      for (const auto& n : done) CHECK(n.load() >= 1);
    }
  }
}

TEST_CASE("a run's writes are seen by the caller and by later phases") {
  ThreadPool pool(4, true);
  std::vector<int> data(10000);
  for (int round = 1; round < 50; ++round) {
    std::atomic<size_t> next{0}, second{0};
    auto body = [&](Member& m) {
      for (size_t i = next.fetch_add(100); i < data.size(); i = next.fetch_add(100)) {
        std::fill_n(data.begin() + static_cast<std::ptrdiff_t>(i), 100, round);
      }
      m.barrier();
      for (size_t i = second.fetch_add(100); i < data.size(); i = second.fetch_add(100)) {
        for (size_t j = i; j < i + 100; ++j) data[j] += data[j] == round ? 1 : -1000000;
      }
    };
    pool.run(body);
    CHECK(std::accumulate(data.begin(), data.end(), int64_t{0}) == int64_t{10000} * (round + 1));
  }
}

TEST_CASE("threads that slept wake up again") {
  ThreadPool pool(3, false);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> ran{0};
    auto body = [&](Member& m) {
      m.barrier();
      ran.fetch_add(1);
    };
    pool.run(body);
    CHECK(ran.load() >= 1);
  }
}

TEST_CASE("a thread that is repeatedly late is benched, work goes on, and it comes back") {
  ThreadPool pool(2, false);
  const auto slow_run = [&](int late_thread) {
    std::atomic<int> ran{0};
    auto body = [&](Member& m) {
      ran.fetch_add(1);
      if (m.thread() == late_thread) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      m.barrier();
    };
    pool.run(body);
    return ran.load();
  };
  for (const int late : {1, 0}) {
    int benched_after = 0;
    while (pool.num_benched() == 0 && benched_after < 20) {
      slow_run(late);
      ++benched_after;
    }
    CHECK(pool.num_benched() == 1);
    CHECK(slow_run(late) == 1);
    for (int i = 0; i < 40 && pool.num_benched() != 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      slow_run(-1);
    }
    CHECK(pool.num_benched() == 0);
    CHECK(slow_run(-1) == 2);
  }
}

TEST_CASE(
    "one thread is benched where all are late in turn") {  // by a process that moves to the CPU of who waits
  ThreadPool pool(2, false);
  auto body = [&](Member& m) {
    for (int phase = 0; phase < 4; ++phase) {
      if (m.thread() == phase % 2) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      m.barrier();
    }
  };
  for (int i = 0; i < 20 && pool.num_benched() == 0; ++i) pool.run(body);
  CHECK(pool.num_benched() == 1);
}

TEST_CASE("a pool can be made and dropped without ever running") {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4, true);
}

#ifndef __SANITIZE_ADDRESS__  // which needs the address space for itself
TEST_CASE("a pool that the system does not let grow says so and ends the threads that it has" *
          doctest::skip(caudal::test::kEmulated)) {
  struct rlimit before;
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  struct rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (size_t{64} << 20);  // a few stacks
  REQUIRE(setrlimit(RLIMIT_AS, &tight) == 0);
  std::string message;
  try {
    ThreadPool pool(500, false);
  } catch (const std::runtime_error& e) {
    message = e.what();
  }
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(message.find("of 500 threads") != std::string::npos);
}
#endif

TEST_CASE("a forked child refuses to run and drops the pool without waiting for threads that it lacks") {
  auto pool = std::make_unique<ThreadPool>(3, false);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    bool refused = false;
    auto body = [](Member&) {};
    try {
      pool->run(body);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    pool.reset();
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  std::atomic<int> ran{0};
  auto body = [&](Member&) { ran.fetch_add(1); };
  pool->run(body);
  CHECK(ran.load() >= 1);  // the parent's pool works on
}

TEST_CASE("regions are aligned, zeroed and movable") {
  Region empty;
  CHECK(empty.data() == nullptr);
  Region a(3 << 20, true);
  CHECK(reinterpret_cast<uintptr_t>(a.data()) % (2 << 20) == 0);
  CHECK(a.data()[12345] == std::byte{0});
  std::byte* p = a.data();
  Region b(std::move(a));
  CHECK(b.data() == p);
  CHECK_THROWS_AS(Region(SIZE_MAX - 100), std::bad_alloc);
}
