// The auction of GraceKV: a heap of offers over the nodes of all prototype trees, see kernels/auction.py.
#include <cstdint>
#include <limits>
#include <new>
#include <queue>
#include <vector>

namespace {

enum State : int8_t { ABSENT, STORED, SPLIT };

struct Offer {
  double utility;
  int64_t turn, node;  // equal utilities go in turn
  bool adds;
  bool operator<(const Offer& other) const {
    return utility < other.utility || (utility == other.utility && turn > other.turn);
  }
};

}  // namespace

// Returns the entries left, or -1 when memory is exhausted.
extern "C" int64_t kvpass_auction(const int64_t* roots, const double* added, int64_t slots, const int64_t* first,
                                  const int64_t* count, const double* split, int8_t* state, int64_t budget,
                                  double* least) {
  try {
    std::vector<Offer> offers;
    std::vector<int64_t> stack;
    offers.reserve(slots);
    for (int64_t j = 0; j < slots; j++) {
      if (state[roots[j]] == ABSENT) {
        offers.push_back({added[j], (int64_t)offers.size(), roots[j], true});
        continue;
      }
      stack.assign(1, roots[j]);
      while (!stack.empty()) {
        const int64_t node = stack.back();
        stack.pop_back();
        if (state[node] == SPLIT) {
          for (int64_t c = count[node]; c-- > 0;) stack.push_back(first[node] + c);
        } else if (count[node]) {
          offers.push_back({split[node], (int64_t)offers.size(), node, false});
        }
      }
    }
    int64_t turn = offers.size();
    std::priority_queue<Offer> heap(std::less<Offer>(), std::move(offers));
    *least = std::numeric_limits<double>::infinity();
    while (!heap.empty() && budget) {
      const Offer best = heap.top();
      heap.pop();
      const int64_t cost = best.adds ? 1 : count[best.node] - 1;
      if (cost > budget) continue;
      budget -= cost;
      if (best.utility < *least) *least = best.utility;
      int64_t begin = best.node, end = best.node + 1;
      state[best.node] = best.adds ? STORED : SPLIT;
      if (!best.adds) {
        begin = first[best.node];
        end = begin + count[best.node];
        for (int64_t c = begin; c < end; c++) state[c] = STORED;
      }
      for (int64_t c = begin; c < end; c++)
        if (count[c]) heap.push({split[c], turn++, c, false});
    }
    return budget;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
