#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "driver/checks.cuh"
#include "driver/clock_offsets.cuh"
#include "driver/device_buffer.h"
#include "driver/held_sms.cuh"
#include "driver/virtual_ranks.h"
#include "peer/failure.h"
#include "peer/rank_memory.h"

namespace entwine {
namespace {

// Inputs in flight: three sets over two parities of slots, so that stale slots cannot pass unseen.
constexpr int kNumSets = 3;

// Events of a rank in one call, behind their number.
constexpr uint32_t kTraceCapacity = 1 << 20;
constexpr size_t kTraceHeadBytes = 256;

// The operands and results of one problem on one rank. whole_x, gathered: AllGather only; whole_x is
// what gathered has to become.
struct Buffers {
  std::unique_ptr<DeviceBuffer> x[kNumSets], w, output[kNumSets];
  std::vector<std::unique_ptr<DeviceBuffer>> product[kNumSets];  // by part of k
  std::unique_ptr<DeviceBuffer> part_of_x;
  std::unique_ptr<DeviceBuffer> whole_x[kNumSets], gathered[kNumSets];
};

// What one call on one rank records.
struct Trace {
  std::unique_ptr<DeviceBuffer> memory;
  TraceBuffer buffer{};
};

struct Rank {
  Rank() = default;
  ~Rank() {
    cudaSetDevice(device);
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
  Rank(const Rank&) = delete;

  int device = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::unique_ptr<RankMemory> shared, alone;  // of the group, and of a group of one
  PeerWindow window{}, alone_window{};
  std::vector<Buffers> buffers;  // by problem
  std::unique_ptr<DeviceBuffer> wrong;
  std::vector<Trace> traces;  // by traced call
};

// Whatever the dtype.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual VirtualRanksResult run() = 0;
  virtual double time_calls(const Schedule& schedule, int num_calls) = 0;
};

template <class Element>
class VirtualRanks : public Ranks {
 public:
  explicit VirtualRanks(const VirtualRanksRequest& request)
      : request_(request), ranks_(request.num_ranks) {
    for (int r = 0; r < request_.num_ranks; r++) set_up(r);
    for (int r = 0; r < request_.num_ranks; r++) {
      PeerWindow& window = ranks_[r].window = window_of(*ranks_[r].shared, r, request_.num_ranks);
      for (int peer = 0; peer < request_.num_ranks; peer++) {
        window.control[peer] = ranks_[peer].shared->control();
        window.slots[peer] = ranks_[peer].shared->slots();
      }
    }
  }

  VirtualRanksResult run() override {
    VirtualRanksResult result{};
    if (verifies()) {
      make_products();
      result.wrong_partials = take_wrong();
      std::unique_ptr<HeldSms> held;
      if (request_.resident_ctas > 0) {
        std::vector<int> devices = used_devices();
        const size_t num_held = std::max(request_.held_devices, 0);
        if (num_held > 0 && num_held < devices.size()) devices.resize(num_held);
        held = std::make_unique<HeldSms>(devices, request_.resident_ctas);
      }
      // Every set of every problem is checked before it is used again.
      const int lap = kNumSets * static_cast<int>(request_.problems.size());
      for (int first = 0; first < request_.num_calls; first += lap) {
        const int last = std::min(first + lap, request_.num_calls);
        for (int call = first; call < last; call++) enqueue(call, true);
        synchronize();
        for (int call = first; call < last; call++) check_outputs(call);
      }
      synchronize();
      if (held != nullptr) held->check_still_held();
    }
    result.wrong_elements = take_wrong();
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
      for (int r = 0; r < request_.num_ranks; r++) {
        Rank& rank = ranks_[r];
        check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
        if (call == 0) {
          check_cuda(cudaEventRecord(rank.begin, rank.stream), "recording an event");
        }
        const int set = (call + num_calls) % kNumSets;
        const Call one = make_call(request_.problems[0], rank.buffers[0], set);
        launch_call(one, schedule, rank.window, request_.num_ctas, rank.stream);
      }
    }
    for (Rank& rank : ranks_) {
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      check_cuda(cudaEventRecord(rank.end, rank.stream), "recording an event");
    }
    synchronize();
    float slowest = 0;
    for (Rank& rank : ranks_) {
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, rank.begin, rank.end), "reading an event");
      slowest = std::max(slowest, milliseconds);
    }
    return slowest * 1e3 / num_calls;
  }

 private:
  struct Turn {
    const VirtualProblem& problem;
    int problem_idx, set;
  };

  Turn turn_of(int call) const {
    const int num_problems = static_cast<int>(request_.problems.size());
    const int problem_idx = call % num_problems;
    return {request_.problems[problem_idx], problem_idx, call / num_problems % kNumSets};
  }

  void set_up(int r) {
    Rank& rank = ranks_[r];
    rank.device = request_.devices[r % request_.devices.size()];
    check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
    for (int peer : request_.devices) {
      if (peer != rank.device) enable_peer_access(peer);
    }
    // All kernels are loaded before any of them runs: loading may wait for running ones.
    load_kernels();
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, check_sum<Element>), "loading a kernel");
    check_cuda(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), "creating a stream");
    check_cuda(cudaEventCreate(&rank.begin), "creating an event");
    check_cuda(cudaEventCreate(&rank.end), "creating an event");
    const size_t slot_bytes = size_t{256} << 20;
    rank.shared = std::make_unique<RankMemory>(slot_bytes);
    if (verifies()) {
      rank.alone = std::make_unique<RankMemory>(slot_bytes);
      rank.alone_window = window_of(*rank.alone, 0, 1);
      rank.alone_window.control[0] = rank.alone->control();
      rank.alone_window.slots[0] = rank.alone->slots();
    }
    rank.wrong = std::make_unique<DeviceBuffer>(sizeof(unsigned long long));
    check_cuda(cudaMemset(rank.wrong->as<void>(), 0, sizeof(unsigned long long)), "clearing");
    for (const VirtualProblem& problem : request_.problems) {
      rank.buffers.push_back(make_buffers(problem, request_.seed + 16 * rank.buffers.size() + r));
    }
    // Before calls are timed, so that the GPUs stay at the clock of sustained work until they are traced.
    for (int call = 0; call < request_.num_traced_calls; call++)
      rank.traces.push_back(make_trace());
    check_cuda(cudaDeviceSynchronize(), "filling the inputs");
  }

  // What calls are verified by takes memory and time of its own.
  bool verifies() const { return request_.num_calls > 0; }

  bool gathers(const VirtualProblem& problem) const { return problem.op == Op::kAllGather; }

  // Rows of x and of the output on one rank.
  int64_t x_rows(const VirtualProblem& problem) const {
    return gathers(problem) ? problem.m / request_.num_ranks : problem.m;
  }
  int64_t output_rows(const VirtualProblem& problem) const {
    return problem.op == Op::kReduceScatter ? problem.m / request_.num_ranks : problem.m;
  }

  Buffers make_buffers(const VirtualProblem& problem, uint64_t seed) const {
    const auto make = [](size_t elements) {
      return std::make_unique<DeviceBuffer>(elements * sizeof(Element));
    };
    const size_t x_size = x_rows(problem) * problem.k, w_size = problem.k * problem.n;
    Buffers buffers;
    buffers.w = make(w_size);
    if (verifies()) buffers.part_of_x = make(x_size);
    fill_random<<<kBlocks, kThreads>>>(buffers.w->as<Element>(), w_size, seed, 0.25f);
    for (int set = 0; set < kNumSets; set++) {
      buffers.x[set] = make(x_size);
      for (int part = 0; verifies() && part < problem.schedule.split_k; part++) {
        buffers.product[set].push_back(make(problem.m * problem.n));
      }
      buffers.output[set] = make(output_rows(problem) * problem.n);
      if (gathers(problem)) {
        if (verifies()) buffers.whole_x[set] = make(problem.m * problem.k);
        buffers.gathered[set] = make(problem.m * problem.k);
      }
      fill_random<<<kBlocks, kThreads>>>(buffers.x[set]->as<Element>(), x_size,
                                         seed + 100000 * (set + 1), 2.0f);
    }
    return buffers;
  }

  // AllGather: puts the x of all ranks together by plain copies.
  void make_whole_x(const VirtualProblem& problem, int problem_idx, int set, const Rank& rank) {
    const int64_t block_rows = problem.m / problem.num_batches / request_.num_ranks;
    const size_t block_bytes = block_rows * problem.k * sizeof(Element);
    for (int64_t batch = 0; batch < problem.num_batches; batch++) {
      for (int source = 0; source < request_.num_ranks; source++) {
        char* to = rank.buffers[problem_idx].whole_x[set]->template as<char>() +
                   (batch * request_.num_ranks + source) * block_bytes;
        const char* from =
            ranks_[source].buffers[problem_idx].x[set]->template as<char>() + batch * block_bytes;
        check_cuda(cudaMemcpyAsync(to, from, block_bytes, cudaMemcpyDefault, rank.stream),
                   "putting x together");
      }
    }
  }

  PeerWindow window_of(const RankMemory& memory, int rank, int num_ranks) const {
    PeerWindow window{};
    window.rank = rank;
    window.num_ranks = num_ranks;
    window.parity_bytes = memory.slot_bytes() / 2;
    window.max_slots = memory.max_slots();
    window.failure = memory.failure();
    window.deadline_ns = static_cast<uint64_t>(request_.deadline_seconds * 1e9);
    return window;
  }

  std::vector<int> used_devices() const {
    std::vector<int> devices;
    for (const Rank& rank : ranks_) {
      if (std::find(devices.begin(), devices.end(), rank.device) == devices.end()) {
        devices.push_back(rank.device);
      }
    }
    return devices;
  }

  Call make_call(const VirtualProblem& problem, const Buffers& buffers, int set) const {
    return {problem.op,
            request_.dtype,
            buffers.x[set]->template as<void>(),
            buffers.w->template as<void>(),
            buffers.output[set]->template as<void>(),
            gathers(problem) ? buffers.gathered[set]->template as<void>() : nullptr,
            problem.m,
            problem.n,
            problem.k,
            problem.num_batches,
            problem.w_transposed};
  }

  // Rows of a launch in a group of one, whose slots hold whole tiles.
  static int64_t rows_that_fit(const VirtualProblem& problem, const PeerWindow& window) {
    const auto [tile_m, tile_n] = std::pair(problem.schedule.tile_m, problem.schedule.tile_n);
    const int64_t tiles_of_a_row = (problem.n + tile_n - 1) / tile_n;
    const int64_t tiles = window.parity_bytes / (tile_m * tile_n * sizeof(Element));
    return std::max<int64_t>(tiles / tiles_of_a_row, 1) * tile_m;
  }

  // Each rank's own products, by the same kernel in a group of one: exactly what it pushes. Those of parts
  // of k are products with an x that is zero outside of the part.
  void make_products() {
    constexpr int kNumSamples = 1024;
    constexpr bool kIsHalf = std::is_same_v<Element, __half>;
    constexpr Rounding kRounding{kIsHalf ? 0x1p-11 : 0x1p-8, kIsHalf ? 0x1p-25 : 0x1p-134};
    const int num_calls = kNumSets * static_cast<int>(request_.problems.size());
    for (Rank& rank : ranks_) {
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      for (int i = 0; i < num_calls; i++) {
        const auto [problem, problem_idx, set] = turn_of(i);
        const Buffers& buffers = rank.buffers[problem_idx];
        if (gathers(problem)) make_whole_x(problem, problem_idx, set, rank);
        const int num_parts = problem.schedule.split_k;
        const int64_t k_of_part =
            num_k_tiles(static_cast<int>(problem.k), num_parts) * int64_t{kTileK};
        for (int part = 0; part < num_parts; part++) {
          const DeviceBuffer* x = gathers(problem) ? &*buffers.whole_x[set] : &*buffers.x[set];
          if (num_parts > 1) {
            take_columns<<<kBlocks, kThreads, 0, rank.stream>>>(
                buffers.part_of_x->template as<Element>(), x->template as<Element>(),
                problem.m * problem.k, problem.k, part * k_of_part, (part + 1) * k_of_part);
            x = &*buffers.part_of_x;
          }
          const DeviceBuffer& product = *buffers.product[set][part];
          Schedule schedule = problem.schedule;
          schedule.num_comm_ctas = schedule.num_senders = 0;
          schedule.narrow_tail = 0;
          schedule.split_k = 1;
          schedule.rows_per_launch = rows_that_fit(problem, rank.alone_window);
          Call call = make_call(problem, buffers, set);
          call.op = Op::kAllReduce;
          call.num_batches = 1;
          call.x = x->template as<void>();
          call.output = product.template as<void>();
          launch_call(call, schedule, rank.alone_window, request_.num_ctas, rank.stream);
          check_partial<<<kNumSamples, kThreads, 0, rank.stream>>>(
              x->template as<Element>(), buffers.w->template as<Element>(),
              product.template as<Element>(), problem.m, problem.n, problem.k, problem.w_transposed,
              kRounding, rank.wrong->template as<unsigned long long>());
        }
      }
    }
    synchronize();
  }

  void enqueue(int call, bool poison, int traced_call = -1) {
    const auto [problem, problem_idx, set] = turn_of(call);
    for (int r = 0; r < request_.num_ranks; r++) {
      if (r == request_.missing_rank) continue;
      Rank& rank = ranks_[r];
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      const Buffers& buffers = rank.buffers[problem_idx];
      // On the rank's own stream right before the launch: a peer that stored before this rank was
      // ready would lose its data.
      if (poison) {
        poison_async(*buffers.output[set], output_rows(problem) * problem.n, rank.stream);
        if (gathers(problem)) {
          poison_async(*buffers.gathered[set], problem.m * problem.k, rank.stream);
        }
      }
      if (request_.late_ms > 0 && r == request_.num_ranks - 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(request_.late_ms));
      }
      Call one = make_call(problem, buffers, set);
      if (traced_call >= 0) one.trace = rank.traces[traced_call].buffer;
      launch_call(one, problem.schedule, rank.window, request_.num_ctas, rank.stream);
    }
  }

  static void poison_async(const DeviceBuffer& buffer, size_t elements, cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(buffer.as<void>(), 0xff, elements * sizeof(Element), stream),
               "poisoning an output");
  }

  // Compares the results of a call on every rank, all of which have ended it.
  void check_outputs(int call) {
    const auto [problem, problem_idx, set] = turn_of(call);
    const int64_t block_rows = problem.m / problem.num_batches / request_.num_ranks;
    for (int r = 0; r < request_.num_ranks; r++) {
      const Rank& rank = ranks_[r];
      const Buffers& buffers = rank.buffers[problem_idx];
      Partials<Element> partials{};
      OutputRows rows{problem.m, problem.m, 0};
      if (gathers(problem)) {
        partials.product[partials.num_products++] = buffers.product[set][0]->template as<Element>();
      } else {
        for (int part = 0; part < problem.schedule.split_k; part++) {
          for (const Rank& source : ranks_) {
            const auto& product = source.buffers[problem_idx].product[set][part];
            partials.product[partials.num_products++] = product->template as<Element>();
          }
        }
      }
      if (problem.op == Op::kReduceScatter) {
        rows = {block_rows, block_rows * request_.num_ranks, r * block_rows};
      }
      check_array(rank, partials, rows, *buffers.output[set], output_rows(problem), problem.n);
      if (gathers(problem)) {
        const Partials<Element> whole{{buffers.whole_x[set]->template as<Element>()}, 1};
        check_array(rank, whole, {problem.m, problem.m, 0}, *buffers.gathered[set], problem.m,
                    problem.k);
      }
    }
  }

  void check_array(const Rank& rank, const Partials<Element>& partials, const OutputRows& rows,
                   const DeviceBuffer& array, int64_t num_rows, int64_t num_columns) {
    check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
    check_sum<<<kBlocks, kThreads, 0, rank.stream>>>(partials, rows, array.as<uint16_t>(),
                                                     num_rows * num_columns, num_columns,
                                                     rank.wrong->template as<unsigned long long>());
  }

  static Trace make_trace() {
    Trace trace;
    trace.memory =
        std::make_unique<DeviceBuffer>(kTraceCapacity * sizeof(TraceEvent) + kTraceHeadBytes);
    auto* count = trace.memory->as<uint32_t>();
    check_cuda(cudaMemset(count, 0, sizeof(*count)), "clearing a trace");
    trace.buffer = {reinterpret_cast<TraceEvent*>(trace.memory->as<char>() + kTraceHeadBytes),
                    count, kTraceCapacity};
    return trace;
  }

  // A call is traced behind others, so that all ranks are in step when it begins.
  std::vector<std::vector<TraceEvent>> trace_calls() {
    constexpr int kCallsBefore = 8;
    for (int traced = 0; traced < request_.num_traced_calls; traced++) {
      for (int call = 0; call < kCallsBefore; call++) enqueue(call, false);
      enqueue(kCallsBefore, false, traced);
    }
    synchronize();
    std::vector<std::vector<TraceEvent>> calls(request_.num_traced_calls);
    for (const Rank& rank : ranks_) {
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      const int64_t offset = clock_offset(rank.device, ranks_[0].device);
      for (int traced = 0; traced < request_.num_traced_calls; traced++) {
        for (TraceEvent event : read_events(rank.traces[traced].buffer)) {
          event.start_ns -= offset;
          event.end_ns -= offset;
          calls[traced].push_back(event);
        }
      }
    }
    return calls;
  }

  static std::vector<TraceEvent> read_events(const TraceBuffer& trace) {
    uint32_t num_events = 0;
    check_cuda(
        cudaMemcpy(&num_events, trace.num_events, sizeof(num_events), cudaMemcpyDeviceToHost),
        "reading a trace");
    if (num_events > kTraceCapacity) {
      throw std::runtime_error("the call has " + std::to_string(num_events) + " events; at most " +
                               std::to_string(kTraceCapacity) + " of a rank can be traced");
    }
    std::vector<TraceEvent> events(num_events);
    check_cuda(cudaMemcpy(events.data(), trace.events, events.size() * sizeof(TraceEvent),
                          cudaMemcpyDeviceToHost),
               "reading a trace");
    return events;
  }

  void synchronize() {
    for (Rank& rank : ranks_) {
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      const cudaError_t error = cudaStreamSynchronize(rank.stream);
      if (error != cudaSuccess) {
        for (const Rank& other : ranks_) {
          const std::string message = describe(*other.shared->failure(), {});
          if (!message.empty()) throw std::runtime_error(message);
        }
      }
      check_cuda(error, "running the kernels");
    }
  }

  int64_t take_wrong() {
    int64_t total = 0;
    for (Rank& rank : ranks_) {
      unsigned long long wrong = 0;
      check_cuda(cudaSetDevice(rank.device), "cudaSetDevice");
      check_cuda(cudaMemcpy(&wrong, rank.wrong->as<void>(), sizeof(wrong), cudaMemcpyDeviceToHost),
                 "reading a count");
      check_cuda(cudaMemset(rank.wrong->as<void>(), 0, sizeof(wrong)), "clearing");
      total += wrong;
    }
    return total;
  }

  const VirtualRanksRequest& request_;
  std::vector<Rank> ranks_;
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

std::unique_ptr<Ranks> make_ranks(const VirtualRanksRequest& request) {
  check(request);
  if (request.dtype == Dtype::kFloat16) return std::make_unique<VirtualRanks<__half>>(request);
  return std::make_unique<VirtualRanks<__nv_bfloat16>>(request);
}

}  // namespace

VirtualRanksResult run_virtual_ranks(const VirtualRanksRequest& request) {
  return make_ranks(request)->run();
}

struct TimedRanks::Impl {
  VirtualRanksRequest request;
  std::unique_ptr<Ranks> ranks;
};

TimedRanks::TimedRanks(VirtualRanksRequest request)
    : impl_(std::make_unique<Impl>(std::move(request))) {
  impl_->request.num_calls = 0;
  impl_->ranks = make_ranks(impl_->request);
}

TimedRanks::~TimedRanks() = default;

double TimedRanks::microseconds(const Schedule& schedule, int num_calls) {
  if (num_calls < 1) {
    throw InvalidCall("num_calls=" + std::to_string(num_calls) + ": must be 1 or more");
  }
  return impl_->ranks->time_calls(schedule, num_calls);
}

}  // namespace entwine
