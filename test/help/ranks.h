// ranks.h - ranks as threads of one process, each with a model of its own: they train it, and the test sees
// the whole tensors. RANKS_PROPERTY is a test that runs on the CPU reference, and on all GPUs.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <omp.h>

#include "../../data/checkpoint.h"
#include "files.h"
#include "model.h"

namespace coat::test {

// 0 in a program without CUDA: there, model_memory.cu has no other definition.
__attribute__((weak)) int number_of_gpus() { return 0; }

// RANKS_PROPERTY("name") { ... make(settings), on up to `most` ranks ... }
#define RANKS_NAMED(name, body)                                                     \
    static void body(Maker make, int64_t most);                                     \
    TEST_CASE("cpu: ranks: " name) { body(make_reference_model, quick() ? 3 : 4); } \
    TEST_CASE("gpu: ranks: " name* doctest::skip(number_of_gpus() < 2)) {           \
        body(make_gpu_model, std::min(number_of_gpus(), 8));                        \
    }                                                                               \
    static void body(Maker make, [[maybe_unused]] int64_t most)
#define RANKS_PROPERTY(name) RANKS_NAMED(name, DOCTEST_ANONYMOUS(ranks_))

// What ranks have in common that are threads: where they meet to exchange values. Once one of them has thrown
// an exception the others do not wait for it; they throw one, too.
class Meeting {
public:
    explicit Meeting(int64_t ranks) : given_(size_t(ranks)) {}

    std::vector<Bytes> exchange(int64_t rank, const Bytes& mine) {
        std::unique_lock lock(mutex_);
        given_[size_t(rank)] = mine;
        const int64_t round = rounds_;
        if (++came_ == given_.size()) {
            came_ = 0;
            rounds_++;
            all_ = given_;
            changed_.notify_all();
        } else {
            changed_.wait(lock, [&] { return rounds_ > round || first_error_; });
        }
        if (rounds_ == round) throw Error("Another rank has failed.");
        return all_;  // the next round ends only after every rank has come back
    }
    void failed(const std::exception_ptr& error) {
        const std::lock_guard lock(mutex_);
        if (!first_error_) first_error_ = error;
        changed_.notify_all();
    }
    std::exception_ptr first_error() {
        const std::lock_guard lock(mutex_);
        return first_error_;
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Bytes> given_, all_;  // by rank: values of this round, and of the last one that has ended
    size_t came_ = 0;                 // ranks that have given their values of this round
    int64_t rounds_ = 0;              // that have ended
    std::exception_ptr first_error_;  // errors of other ranks follow from it
};

class ThreadRank : public Communicator {
public:
    ThreadRank(Meeting* meeting, int64_t rank) : meeting_(meeting), rank_(rank) { ranks_are_threads = true; }

    int local_rank() const override { return int(rank_); }
    std::vector<Bytes> gather(const Bytes& mine, bool on_all) override {
        std::vector<Bytes> values = meeting_->exchange(rank_, mine);
        if (on_all || rank_ == 0) return values;
        std::vector<Bytes> only_mine(values.size());
        only_mine[size_t(rank_)] = mine;
        return only_mine;
    }
    void wait_until(const std::function<bool()>& done) override {
        while (!done())
            if (meeting_->first_error()) throw Error("Another rank has failed.");
    }
    [[noreturn]] void fail(const std::string& sentence) override { throw Error(sentence); }

private:
    Meeting* meeting_;
    int64_t rank_;
};

// Calls body(settings) for every rank, each in its thread. One rank has none beside it, as in ./train. The first
// exception that a rank throws is thrown again when all have ended.
inline void with_ranks(const RunSettings& settings, int64_t ranks,
                       const std::function<void(const RunSettings&)>& body) {
    Meeting meeting(ranks);
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            omp_set_num_threads(1);
            ThreadRank communicator(&meeting, rank);
            RunSettings own = settings;
            own.rank = rank;
            own.ranks = ranks;
            own.communicator = ranks > 1 ? &communicator : nullptr;
            try {
                body(own);
            } catch (...) {
                meeting.failed(std::current_exception());
            }
        });
    for (std::thread& thread : threads) thread.join();
    if (meeting.first_error()) std::rethrow_exception(meeting.first_error());
}

// What a run leaves: its steps and the tensors that every rank has, as each rank saw them; the whole tensors.
struct RankRun {
    Doubles losses, norms;
    Snapshot everywhere, state, gradients;
};
inline void check_same(const RankRun& a, const RankRun& b) {
    for (size_t i = 0; i < b.losses.size(); i++)  // on GPUs they are sums in double, in another order
        CHECK(a.losses[i] == doctest::Approx(b.losses[i]).epsilon(1e-14));
    CHECK(a.norms == b.norms);
    CHECK(a.state == b.state);
    CHECK(a.gradients == b.gradients);
}

// A rank that trains on its part of the text. Step i of any number of ranks has the same micro-batches.
struct RankTraining : Training {
    bool masked;
    RankTraining(Maker make, const RunSettings& own, bool some = false) : Training(make, own), masked(some) {}
    Tokens own_part(const Tokens& all) const {
        const RunSettings& s = settings();
        Tokens own;
        for (int64_t a = 0; a < s.micro_batches_per_rank; a++) {
            const auto begin = all.begin() + (a * s.ranks + s.rank) * s.B * s.T;
            own.insert(own.end(), begin, begin + s.B * s.T);
        }
        return own;
    }
    void next() {
        const RunSettings& s = settings();
        text.next(s.micro_batches_per_rank * s.ranks * s.B, s.T, &tokens, &targets);
        if (masked) mask_unevenly(&targets, s.B * s.T);
        tokens = own_part(tokens);
        targets = own_part(targets);
    }
    Snapshot whole(const std::vector<StateTensor>& table) const {
        Snapshot bytes;
        for (const StateTensor& t : table) bytes[t.name] = gather_whole_tensor(*model, t);
        return bytes;
    }
};

inline RankRun train_ranks(Maker make, const RunSettings& settings, int64_t ranks, int steps,
                           bool masked = false) {
    std::vector<RankRun> runs{size_t(ranks)};
    with_ranks(settings, ranks, [&](const RunSettings& own) {
        RankTraining training(make, own, masked);
        RankRun& run = runs[size_t(own.rank)];
        for (int i = 0; i < steps; i++) {
            training.next();
            const StepResult result = training.again();
            run.losses.push_back(result.skipped ? NAN : result.loss);
            run.norms.push_back(result.grad_norm);
        }
        std::vector<StateTensor> gradients;
        for (const Param& p : training.params())
            gradients.push_back({p.name + ".gradient", "F32", 4, {p.size()}, p});
        run.gradients = training.whole(gradients);
        run.state = training.whole(state_tensors(own));
        for (const StateTensor& t : state_tensors(own))  // delayed scales, norm weights and biases
            if (t.shared_by == 0 || (t.name == t.param.name && t.param.rows == 1))
                run.everywhere[t.name] = read_as<uint8_t>(*training.model, t.name, t.total_bytes());
    });
    for (const RankRun& run : runs) {
        CHECK(run.losses == runs[0].losses);
        CHECK(run.norms == runs[0].norms);
        CHECK((run.everywhere == runs[0].everywhere));
        for (double loss : run.losses) CHECK(std::isfinite(loss));
    }
    return runs[0];
}

}  // namespace coat::test
