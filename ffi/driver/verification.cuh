// Whether the results of calls are what they have to be, bit by bit.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "driver/checks.cuh"
#include "driver/rank.cuh"

namespace entwine {

// Expects of every call the sum in float32 and rank order of the ranks' own products. Those are made by
// the same kernel in a group of one, so that they are exactly what it pushes, and are themselves compared
// with float64.
template <class Element>
class Verification {
 public:
  Verification(const VirtualRanksRequest& request, const Ranks& ranks)
      : request_(request), ranks_(ranks) {
    for (const std::unique_ptr<Rank>& rank : ranks) {
      rank->make_current();
      Own own;
      own.memory = std::make_unique<RankMemory>(Rank::kSlotBytes);
      own.window = make_window({own.memory.get()}, 0, request.deadline_seconds);
      own.wrong = std::make_unique<DeviceBuffer>(sizeof(unsigned long long));
      check_cuda(cudaMemset(own.wrong->template as<void>(), 0, sizeof(unsigned long long)),
                 "clearing");
      for (const VirtualProblem& problem : request.problems) {
        own.expected.push_back(make_expected(problem));
      }
      own_.push_back(std::move(own));
    }
  }

  // Loads the kernels that compare: loading may wait for running ones.
  static void load() {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, check_sum<Element>), "loading a kernel");
  }

  // The products of all ranks; how many of the sampled elements are off against float64.
  int64_t make_products() {
    for (size_t r = 0; r < ranks_.size(); r++) {
      ranks_[r]->make_current();
      for (size_t p = 0; p < request_.problems.size(); p++) {
        for (int set = 0; set < kNumSets; set++) make_products(*ranks_[r], own_[r], p, set);
      }
    }
    synchronize(ranks_);
    return take_wrong();
  }

  // Poisons what a call is to write, on the rank's own stream right before the launch: a peer that stored
  // before this rank was ready would lose its data.
  void poison(const Rank& rank, size_t problem_idx, int set) const {
    const VirtualProblem& problem = request_.problems[problem_idx];
    const Operands& operands = rank.operands[problem_idx];
    poison(rank, *operands.output[set], output_rows(problem, request_.num_ranks) * problem.n);
    if (gathers(problem)) poison(rank, *operands.gathered[set], problem.m * problem.k);
  }

  // Compares the results of a call on every rank, in the order of the rank's own stream.
  void check_outputs(size_t problem_idx, int set) const {
    const VirtualProblem& problem = request_.problems[problem_idx];
    const int64_t rows_of_block = block_rows(problem, request_.num_ranks);
    const int64_t num_rows = output_rows(problem, request_.num_ranks);
    for (size_t r = 0; r < ranks_.size(); r++) {
      const Operands& operands = ranks_[r]->operands[problem_idx];
      const Expected& expected = own_[r].expected[problem_idx];
      Partials<Element> partials{};
      OutputRows rows{problem.m, problem.m, 0};
      if (gathers(problem)) {
        partials = one(*expected.product[set][0]);
        if (request_.num_ranks > 1) {
          check_array(r, one(*expected.whole_x[set]), rows, *operands.gathered[set], problem.m,
                      problem.k);
        }
      } else {
        partials = of_all_ranks(problem_idx, set);
      }
      if (problem.op == Op::kReduceScatter) {
        rows = {rows_of_block, rows_of_block * request_.num_ranks,
                static_cast<int64_t>(r) * rows_of_block};
      }
      check_array(r, partials, rows, *operands.output[set], num_rows, problem.n);
    }
  }

  // Elements found wrong since the last time.
  int64_t take_wrong() {
    int64_t total = 0;
    for (size_t r = 0; r < ranks_.size(); r++) {
      unsigned long long wrong = 0;
      ranks_[r]->make_current();
      check_cuda(cudaMemcpy(&wrong, own_[r].wrong->template as<void>(), sizeof(wrong),
                            cudaMemcpyDeviceToHost),
                 "reading a count");
      check_cuda(cudaMemset(own_[r].wrong->template as<void>(), 0, sizeof(wrong)), "clearing");
      total += wrong;
    }
    return total;
  }

 private:
  using Array = std::unique_ptr<DeviceBuffer>;

  // Of one problem on one rank. whole_x: what gathered has to become.
  struct Expected {
    std::vector<Array> product[kNumSets];  // by part of k
    Array part_of_x, whole_x[kNumSets];
  };

  // Of one rank, for a group of its own.
  struct Own {
    std::unique_ptr<RankMemory> memory;
    PeerWindow window;
    Array wrong;
    std::vector<Expected> expected;  // by problem
  };

  Expected make_expected(const VirtualProblem& problem) const {
    Expected expected;
    if (problem.schedule.split_k > 1) {
      expected.part_of_x = make_array<Element>(x_rows(problem, request_.num_ranks) * problem.k);
    }
    for (int set = 0; set < kNumSets; set++) {
      for (int part = 0; part < problem.schedule.split_k; part++) {
        expected.product[set].push_back(make_array<Element>(problem.m * problem.n));
      }
      if (gathers(problem)) expected.whole_x[set] = make_array<Element>(problem.m * problem.k);
    }
    return expected;
  }

  // Those of parts of k are products with an x that is zero outside of the part.
  void make_products(const Rank& rank, const Own& own, size_t problem_idx, int set) {
    const VirtualProblem& problem = request_.problems[problem_idx];
    const Expected& expected = own.expected[problem_idx];
    if (gathers(problem)) put_x_together(rank, problem_idx, set, *expected.whole_x[set]);
    const DeviceBuffer& x =
        *(gathers(problem) ? expected.whole_x[set] : rank.operands[problem_idx].x[set]);
    const int num_parts = static_cast<int>(problem.schedule.split_k);
    if (num_parts == 1) {
      make_product(rank, own, problem_idx, x, *expected.product[set][0]);
      return;
    }
    const int64_t k_of_part = num_k_tiles(static_cast<int>(problem.k), num_parts) * int64_t{kTileK};
    for (int part = 0; part < num_parts; part++) {
      take_columns<<<kBlocks, kThreads, 0, rank.stream>>>(
          expected.part_of_x->template as<Element>(), x.as<Element>(), problem.m * problem.k,
          problem.k, part * k_of_part, (part + 1) * k_of_part);
      make_product(rank, own, problem_idx, *expected.part_of_x, *expected.product[set][part]);
    }
  }

  void make_product(const Rank& rank, const Own& own, size_t problem_idx, const DeviceBuffer& x,
                    const DeviceBuffer& product) {
    constexpr int kNumSamples = 1024;
    constexpr bool kIsHalf = std::is_same_v<Element, __half>;
    constexpr Rounding kRounding{kIsHalf ? 0x1p-11 : 0x1p-8, kIsHalf ? 0x1p-25 : 0x1p-134};
    const VirtualProblem& problem = request_.problems[problem_idx];
    const DeviceBuffer& w = *rank.operands[problem_idx].w;
    Schedule schedule = problem.schedule;
    schedule.num_comm_ctas = schedule.num_senders = 0;
    schedule.narrow_tail = 0;
    schedule.split_k = 1;
    schedule.rows_per_launch = rows_that_fit(problem, own.window);
    const Call call{.op = Op::kAllReduce,
                    .dtype = request_.dtype,
                    .x = x.as<void>(),
                    .w = w.as<void>(),
                    .output = product.as<void>(),
                    .gathered = nullptr,
                    .m = problem.m,
                    .n = problem.n,
                    .k = problem.k,
                    .num_batches = 1,
                    .w_transposed = problem.w_transposed};
    launch_call(call, schedule, own.window, request_.num_ctas, rank.stream);
    check_partial<<<kNumSamples, kThreads, 0, rank.stream>>>(
        x.as<Element>(), w.as<Element>(), product.as<Element>(), problem.m, problem.n, problem.k,
        problem.w_transposed, kRounding, own.wrong->template as<unsigned long long>());
    check_cuda(cudaGetLastError(), "comparing a product");
  }

  // Rows of a launch in a group of one, whose slots hold whole tiles.
  static int64_t rows_that_fit(const VirtualProblem& problem, const PeerWindow& window) {
    const auto [tile_m, tile_n] = std::pair(problem.schedule.tile_m, problem.schedule.tile_n);
    const int64_t tiles_of_a_row = (problem.n + tile_n - 1) / tile_n;
    const int64_t tiles = window.parity_bytes / (tile_m * tile_n * sizeof(Element));
    return std::max<int64_t>(tiles / tiles_of_a_row, 1) * tile_m;
  }

  // AllGather: the x of all ranks, by plain copies.
  void put_x_together(const Rank& rank, size_t problem_idx, int set, const DeviceBuffer& whole_x) {
    const VirtualProblem& problem = request_.problems[problem_idx];
    const size_t block_bytes =
        block_rows(problem, request_.num_ranks) * problem.k * sizeof(Element);
    char* to = whole_x.as<char>();
    for (int64_t batch = 0; batch < problem.num_batches; batch++) {
      for (const std::unique_ptr<Rank>& source : ranks_) {
        const char* from =
            source->operands[problem_idx].x[set]->template as<char>() + batch * block_bytes;
        check_cuda(cudaMemcpyAsync(to, from, block_bytes, cudaMemcpyDefault, rank.stream),
                   "putting x together");
        to += block_bytes;
      }
    }
  }

  static void poison(const Rank& rank, const DeviceBuffer& array, size_t num_elements) {
    check_cuda(cudaMemsetAsync(array.as<void>(), 0xff, num_elements * sizeof(Element), rank.stream),
               "poisoning an output");
  }

  static Partials<Element> one(const DeviceBuffer& array) { return {{array.as<Element>()}, 1}; }

  Partials<Element> of_all_ranks(size_t problem_idx, int set) const {
    Partials<Element> partials{};
    for (int part = 0; part < request_.problems[problem_idx].schedule.split_k; part++) {
      for (const Own& source : own_) {
        const Array& product = source.expected[problem_idx].product[set][part];
        partials.product[partials.num_products++] = product->template as<Element>();
      }
    }
    return partials;
  }

  void check_array(size_t r, const Partials<Element>& partials, const OutputRows& rows,
                   const DeviceBuffer& array, int64_t num_rows, int64_t num_columns) const {
    ranks_[r]->make_current();
    check_sum<<<kBlocks, kThreads, 0, ranks_[r]->stream>>>(
        partials, rows, array.as<uint16_t>(), num_rows * num_columns, num_columns,
        own_[r].wrong->template as<unsigned long long>());
    check_cuda(cudaGetLastError(), "comparing an output");
  }

  const VirtualRanksRequest& request_;
  const Ranks& ranks_;
  std::vector<Own> own_;
};

}  // namespace entwine
