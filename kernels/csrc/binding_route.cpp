// Choosing each token's experts in one call: each of torch's own three takes as long as the whole
// for the few tokens of a decoding step.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "binding.h"

namespace {

using at::Tensor;

// The k largest of a row, and where they stand. The order, and who is taken of equals, follow from
// the algorithm: torch.topk's own for unsorted results, so that ties go to the same experts.
using Entry = std::pair<float, int64_t>;

void take_largest(std::vector<Entry>& row, int64_t k) {
  const auto before = [](const Entry& a, const Entry& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  if (k * 64 <= static_cast<int64_t>(row.size())) {
    std::partial_sort(row.begin(), row.begin() + k, row.end(), before);
  } else {
    std::nth_element(row.begin(), row.begin() + k - 1, row.end(), before);
  }
}

template <typename T>
void route_rows(const T* logits, int64_t tokens, int64_t experts, int64_t k, float* weights,
                int64_t* ids) {
  const int64_t grain = std::max<int64_t>(1, dps::kGrain / (16 * experts));
  at::parallel_for(0, tokens, grain, [&](int64_t first, int64_t last) {
    std::vector<Entry> row(experts);
    for (int64_t token = first; token < last; ++token) {
      for (int64_t expert = 0; expert < experts; ++expert)
        row[expert] = {static_cast<float>(logits[token * experts + expert]), expert};
      take_largest(row, k);
      float* const weight = weights + token * k;
      float best = row[0].first, sum = 0;
      for (int64_t i = 1; i < k; ++i) best = std::max(best, row[i].first);
      for (int64_t i = 0; i < k; ++i) sum += weight[i] = std::exp(row[i].first - best);
      for (int64_t i = 0; i < k; ++i) {
        weight[i] = static_cast<float>(static_cast<T>(weight[i] / sum));
        ids[token * k + i] = row[i].second;
      }
    }
  });
}

}  // namespace

namespace dps {

std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k) {
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  TORCH_CHECK(top_k > 0 && top_k <= experts, "top_k is ", top_k, ": take 1 to ", experts,
              " experts");
  const Tensor rows = logits.contiguous();
  Tensor weights = at::empty({tokens, top_k}, rows.options().dtype(at::kFloat));
  Tensor ids = at::empty({tokens, top_k}, rows.options().dtype(at::kLong));
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, rows.scalar_type(), "route", [&] {
        route_rows(rows.const_data_ptr<scalar_t>(), tokens, experts, top_k,
                   weights.mutable_data_ptr<float>(), ids.mutable_data_ptr<int64_t>());
      });
  return {weights, ids};
}

}  // namespace dps
