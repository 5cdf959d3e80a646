#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "driver/clock_offsets.cuh"
#include "driver/held_sms.cuh"
#include "driver/rank.cuh"
#include "driver/recording.h"
#include "driver/verification.cuh"
#include "driver/virtual_ranks.h"
#include "peer/failure.h"

namespace entwine {

void synchronize(const Ranks& ranks) {
  for (const std::unique_ptr<Rank>& rank : ranks) {
    rank->make_current();
    const cudaError_t error = cudaStreamSynchronize(rank->stream);
    if (error != cudaSuccess) {
      for (const std::unique_ptr<Rank>& other : ranks) {
        const std::string message = describe(*other->shared->failure(), {});
        if (!message.empty()) throw std::runtime_error(message);
      }
    }
    check_cuda(error, "running the kernels");
  }
}

namespace {

// Whatever the dtype.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual VirtualRanksResult run() = 0;
  virtual double time_calls(const Schedule& schedule, int num_calls) = 0;
};

template <class Element>
class DriverOf : public Driver {
 public:
  explicit DriverOf(const VirtualRanksRequest& request) : request_(request) {
    for (int r = 0; r < request.num_ranks; r++) add_rank(r);
    std::vector<const RankMemory*> memories;
    for (const auto& rank : ranks_) memories.push_back(rank->shared.get());
    for (int r = 0; r < request.num_ranks; r++) {
      ranks_[r]->window = make_window(memories, r, request.deadline_seconds);
    }
    // It takes memory and time of its own.
    if (request.num_calls > 0) {
      verification_ = std::make_unique<Verification<Element>>(request, ranks_);
    }
    for (const auto& rank : ranks_) {
      rank->make_current();
      check_cuda(cudaDeviceSynchronize(), "filling the inputs");
    }
  }

  VirtualRanksResult run() override {
    VirtualRanksResult result{};
    if (verification_ != nullptr) {
      result.wrong_partials = verification_->make_products();
      result.wrong_elements = verify_calls();
    }
    if (request_.num_timed_calls > 0) {
      result.microseconds = time_calls(request_.problems[0].schedule, request_.num_timed_calls);
    }
    if (request_.num_traced_calls > 0) result.events = trace_calls();
    return result;
  }

  // Of the first problem, with this schedule in place of its own, behind as many calls that are not
  // timed: GPUs that have idled, or waited for a link, run faster at first.
  double time_calls(const Schedule& schedule, int num_calls) override {
    for (int call = -num_calls; call < num_calls; call++) {
      for (const auto& rank : ranks_) {
        rank->make_current();
        if (call == 0) {
          check_cuda(cudaEventRecord(rank->begin, rank->stream), "recording an event");
        }
        const int set = (call + num_calls) % kNumSets;
        const Call one = rank->operands[0].call(request_.problems[0], request_.dtype, set);
        launch_call(one, schedule, rank->window, request_.num_ctas, rank->stream);
      }
    }
    for (const auto& rank : ranks_) {
      rank->make_current();
      check_cuda(cudaEventRecord(rank->end, rank->stream), "recording an event");
    }
    synchronize(ranks_);
    float slowest = 0;
    for (const auto& rank : ranks_) {
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, rank->begin, rank->end), "reading an event");
      slowest = std::max(slowest, milliseconds);
    }
    return slowest * 1e3 / num_calls;
  }

 private:
  void add_rank(int r) {
    const int device = request_.devices[r % request_.devices.size()];
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    for (int peer : request_.devices) {
      if (peer != device) enable_peer_access(peer);
    }
    // All kernels are loaded before any of them runs: loading may wait for running ones.
    load_kernels();
    Verification<Element>::load();
    auto rank = std::make_unique<Rank>(device);
    for (const VirtualProblem& problem : request_.problems) {
      const uint64_t seed = request_.seed + 16 * rank->operands.size() + r;
      rank->operands.push_back(make_operands<Element>(problem, request_.num_ranks, seed));
    }
    // Before calls are timed, so that the GPUs stay at the clock of sustained work until they are traced.
    recordings_.emplace_back(request_.num_traced_calls);
    ranks_.push_back(std::move(rank));
  }

  // The problem and the set of operands that a call takes.
  std::pair<int, int> turn_of(int call) const {
    const int num_problems = static_cast<int>(request_.problems.size());
    return {call % num_problems, call / num_problems % kNumSets};
  }

  int64_t verify_calls() {
    std::unique_ptr<HeldSms> held;
    if (request_.resident_ctas > 0) {
      held = std::make_unique<HeldSms>(devices_to_hold(), request_.resident_ctas);
    }
    // Every set of every problem is checked before it is used again.
    const int lap = kNumSets * static_cast<int>(request_.problems.size());
    for (int first = 0; first < request_.num_calls; first += lap) {
      const int last = std::min(first + lap, request_.num_calls);
      for (int call = first; call < last; call++) enqueue(call, true);
      // Each rank reads its outputs as soon as its own kernel has ended, the last one first: a kernel that
      // ends before its peers have stored everything is found out.
      for (int call = last - 1; call >= first; call--) {
        const auto [problem_idx, set] = turn_of(call);
        verification_->check_outputs(problem_idx, set);
      }
      synchronize(ranks_);
    }
    if (held != nullptr) held->check_still_held();
    return verification_->take_wrong();
  }

  // Each once.
  std::vector<int> devices_to_hold() const {
    std::vector<int> devices;
    for (const auto& rank : ranks_) {
      if (std::ranges::find(devices, rank->device) == devices.end()) {
        devices.push_back(rank->device);
      }
    }
    const size_t num_held = std::max(request_.held_devices, 0);
    if (num_held > 0 && num_held < devices.size()) devices.resize(num_held);
    return devices;
  }

  void enqueue(int call, bool poison, int traced_call = -1) {
    const auto [problem_idx, set] = turn_of(call);
    const VirtualProblem& problem = request_.problems[problem_idx];
    for (int r = 0; r < request_.num_ranks; r++) {
      if (r == request_.missing_rank) continue;
      const Rank& rank = *ranks_[r];
      rank.make_current();
      if (poison) verification_->poison(rank, problem_idx, set);
      if (request_.late_ms > 0 && r == request_.num_ranks - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(request_.late_ms));
      }
      Call one = rank.operands[problem_idx].call(problem, request_.dtype, set);
      if (traced_call >= 0) one.trace = recordings_[r][traced_call].buffer();
      launch_call(one, problem.schedule, rank.window, request_.num_ctas, rank.stream);
    }
  }

  // A call is traced behind others, so that all ranks are in step when it begins.
  std::vector<std::vector<TraceEvent>> trace_calls() {
    constexpr int kCallsBefore = 8;
    for (int traced = 0; traced < request_.num_traced_calls; traced++) {
      for (int call = 0; call < kCallsBefore; call++) enqueue(call, false);
      enqueue(kCallsBefore, false, traced);
    }
    synchronize(ranks_);
    std::vector<std::vector<TraceEvent>> calls(request_.num_traced_calls);
    for (int r = 0; r < request_.num_ranks; r++) {
      ranks_[r]->make_current();
      const int64_t offset = clock_offset(ranks_[r]->device, ranks_[0]->device);
      for (int traced = 0; traced < request_.num_traced_calls; traced++) {
        for (TraceEvent event : recordings_[r][traced].read()) {
          event.start_ns -= offset;
          event.end_ns -= offset;
          calls[traced].push_back(event);
        }
      }
    }
    return calls;
  }

  const VirtualRanksRequest& request_;
  Ranks ranks_;
  std::unique_ptr<Verification<Element>> verification_;
  std::vector<std::vector<Recording>> recordings_;  // by rank and traced call
};

void check(const VirtualRanksRequest& request) {
  if (request.num_ranks < 1 || request.num_ranks > kMaxRanks || request.devices.empty()) {
    throw InvalidCall("num_ranks=" + std::to_string(request.num_ranks) +
                      ": must be in 1..8, on at least one device");
  }
  for (const VirtualProblem& problem : request.problems) {
    if (problem.m < 1 || problem.n < 1 || problem.k < 1 || problem.num_batches < 1 ||
        problem.schedule.tile_m < 1 || problem.schedule.tile_n < 1 ||
        problem.schedule.split_k < 1 ||
        problem.schedule.split_k * request.num_ranks > kMaxSources) {
      throw InvalidCall(
          "problems: m, n, k, num_batches, tile_m, tile_n and split_k must be positive, and "
          "split_k at most 8 / num_ranks");
    }
  }
  if (request.problems.empty()) throw InvalidCall("problems: there must be at least one");
  if (request.num_timed_calls > 0 && request.problems.size() > 1) {
    throw InvalidCall("num_timed_calls: calls of one problem can be timed");
  }
  if (request.num_traced_calls > 0 && request.dtype != Dtype::kBfloat16) {
    throw InvalidCall("dtype: only bfloat16 calls can be traced");
  }
}

std::unique_ptr<Driver> make_driver(const VirtualRanksRequest& request) {
  check(request);
  if (request.dtype == Dtype::kFloat16) return std::make_unique<DriverOf<__half>>(request);
  return std::make_unique<DriverOf<__nv_bfloat16>>(request);
}

}  // namespace

VirtualRanksResult run_virtual_ranks(const VirtualRanksRequest& request) {
  return make_driver(request)->run();
}

struct TimedRanks::Impl {
  VirtualRanksRequest request;
  std::unique_ptr<Driver> driver;
};

TimedRanks::TimedRanks(VirtualRanksRequest request)
    : impl_(std::make_unique<Impl>(std::move(request))) {
  impl_->request.num_calls = 0;
  impl_->driver = make_driver(impl_->request);
}

TimedRanks::~TimedRanks() = default;

double TimedRanks::microseconds(const Schedule& schedule, int num_calls) {
  if (num_calls < 1) {
    throw InvalidCall("num_calls=" + std::to_string(num_calls) + ": must be 1 or more");
  }
  return impl_->driver->time_calls(schedule, num_calls);
}

}  // namespace entwine
