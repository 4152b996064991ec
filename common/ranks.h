// common/ranks.h - the ranks of a run, which are its processes: what each of them owns, and how they exchange
// small values. (With one rank only owned() is needed, and the rank owns all elements.)
#pragma once
#include <cstring>
#include <functional>
#include <type_traits>

#include "model.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// What a rank owns
//
//   a matrix   is divided among the ranks, as in ZeRO-3. A rank updates the weights, masters and moments of
//              its part. On a GPU a rank stores nothing but its part, and gathers a whole matrix just before
//              the matrix is used. On the CPU every rank has all weights, and after each update it sends the
//              weights of its part to the others
//   a vector   is small: every rank owns the whole vector, and computes the same update

// A unit is UNIT_SIZE elements of a parameter, or fewer at its end. Matrices are cut between units.
//   - So no moment group is cut.
//   - Sums over a matrix are the same for any number of ranks, because each unit is summed first.
//   - If a matrix has fewer units than there are ranks, some ranks own nothing of it.
inline constexpr int64_t UNIT_SIZE = 64 * MOMENT_GROUP_SIZE;

// The elements of a parameter that a rank owns.
inline Range owned(const Param& p, int64_t rank, int64_t ranks) {
    if (p.is_vector()) return {.first = 0, .count = p.size()};
    const int64_t units = ceil_div(p.size(), UNIT_SIZE);
    const int64_t begin = std::min(p.size(), (units * rank / ranks) * UNIT_SIZE);
    const int64_t end = std::min(p.size(), (units * (rank + 1) / ranks) * UNIT_SIZE);
    return {.first = begin, .count = end - begin};
}
inline Range owned(const RunSettings& s, const Param& p) { return owned(p, s.rank, s.ranks); }
// The number of elements with the padding that completes the last moment group.
inline int64_t padded_count(const Range& r) { return round_up(r.count, MOMENT_GROUP_SIZE); }

// -----------------------------------------------------------------------------------------------------------
// How the ranks of a run exchange small values, and notice that one has ended. A model and a checkpoint use
// this interface; program/ implements it.

using Bytes = std::vector<uint8_t>;

class Communicator {
public:
    virtual ~Communicator() = default;
    virtual int local_rank() const = 0;  // this rank's number among those of its machine
    // Whether the ranks are threads of one process, as in tests, and share its addresses.
    bool ranks_are_threads = false;

    // Every rank calls this at the same time. It returns what the ranks have given, by rank, on every rank. A
    // Value is a number or a struct; or a vector or string, which may have another length on each rank.
    template <class Value> std::vector<Value> all_gather(const Value& mine);
    // As all_gather(), for bytes. If `on_all` is false, rank 0 alone gets the bytes.
    virtual std::vector<Bytes> gather(const Bytes& mine, bool on_all) = 0;

    // Waits until done() is true; done() may sleep for some milliseconds. If another rank ends meanwhile, so
    // does this process.
    virtual void wait_until(const std::function<bool()>& done) = 0;
    // Ends all ranks with exit code 1, after rank 0 has printed this sentence once.
    [[noreturn]] virtual void fail(const std::string& sentence) = 0;
};

template <class Value> std::vector<Value> Communicator::all_gather(const Value& mine) {
    std::vector<Value> all;
    if constexpr (std::is_trivially_copyable_v<Value>) {
        for (const std::vector<Value>& theirs : all_gather(std::vector<Value>{mine}))
            all.push_back(theirs[0]);
    } else {
        const auto* bytes = reinterpret_cast<const uint8_t*>(mine.data());
        for (const Bytes& theirs : gather(Bytes(bytes, bytes + mine.size() * sizeof(mine[0])), true)) {
            all.emplace_back(theirs.size() / sizeof(mine[0]), typename Value::value_type{});
            if (!theirs.empty()) std::memcpy(&all.back()[0], theirs.data(), theirs.size());
        }
    }
    return all;
}

}  // namespace coat
