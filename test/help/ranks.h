// ranks.h - ranks as threads of one process, each with a model of its own: they train it, and the test sees
// the whole tensors. RANKS_PROPERTY is a test that runs on the CPU reference, and on all GPUs.
#pragma once
#include <functional>
#include <omp.h>
#include <sys/socket.h>
#include <thread>

#include "../../data/checkpoint.h"
#include "../../program/processes.h"
#include "files.h"
#include "model.h"

namespace coat::test {

// 0 in a program without CUDA: there, model_memory.cu has no other definition.
__attribute__((weak)) int number_of_gpus() { return 0; }

// RANKS_PROPERTY("name") { ... make(setup), on up to `most` ranks ... }
#define RANKS_NAMED(name, body)                                               \
    static void body(Maker make, int64_t most);                               \
    TEST_CASE("cpu: ranks: " name) { body(make_reference, quick() ? 3 : 4); } \
    TEST_CASE("gpu: ranks: " name* doctest::skip(number_of_gpus() < 2)) {     \
        body(make_gpu, std::min(number_of_gpus(), 8));                        \
    }                                                                         \
    static void body(Maker make, [[maybe_unused]] int64_t most)
#define RANKS_PROPERTY(name) RANKS_NAMED(name, DOCTEST_ANONYMOUS(ranks_))

// Calls body(setup) for every rank, each in its thread. One rank has none beside it, as in ./train.
inline void with_ranks(const Setup& setup, int64_t ranks, const std::function<void(const Setup&)>& body) {
    std::vector<std::vector<int>> sockets(size_t(ranks), std::vector<int>(size_t(ranks), -1));
    for (size_t rank = 1; rank < sockets.size(); rank++) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        sockets[0][rank] = ends[0];
        sockets[rank][0] = ends[1];
    }
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {  // an exception is printed, and ends the tests
            omp_set_num_threads(1);
            std::unique_ptr<ProcessGroup> processes;
            if (ranks > 1) {
                processes = std::make_unique<ProcessGroup>(int(rank), int(rank), sockets[size_t(rank)]);
                processes->ranks_are_threads = true;
            }
            Setup own = setup;
            own.rank = rank;
            own.ranks = ranks;
            own.communicator = processes.get();
            body(own);
        });
    for (std::thread& thread : threads) thread.join();
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
    CHECK((a.state == b.state && a.gradients == b.gradients));
}

// A rank that trains on its part of the text. Step i of any number of ranks has the same micro-batches.
struct RankTraining : Training {
    bool masked;
    RankTraining(Maker make, const Setup& own, bool some = false) : Training(make, own), masked(some) {}
    Tokens own_part(const Tokens& all) const {
        const Setup& s = setup();
        Tokens own;
        for (int64_t a = 0; a < s.micro_batches_per_rank; a++) {
            const auto begin = all.begin() + (a * s.ranks + s.rank) * s.B * s.T;
            own.insert(own.end(), begin, begin + s.B * s.T);
        }
        return own;
    }
    void next() {
        const Setup& s = setup();
        text.next(s.micro_batches_per_rank * s.ranks * s.B, s.T, &tokens, &targets);
        if (masked) mask_unevenly(&targets, s.B * s.T);
        tokens = own_part(tokens);
        targets = own_part(targets);
    }
    Snapshot whole(const std::vector<StateTensor>& table) const {
        Snapshot bytes;
        for (const StateTensor& t : table) bytes[t.name] = whole_tensor(*model, t);
        return bytes;
    }
};

inline RankRun train_ranks(Maker make, const Setup& setup, int64_t ranks, int steps, bool masked = false) {
    std::vector<RankRun> runs{size_t(ranks)};
    with_ranks(setup, ranks, [&](const Setup& own) {
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
        CHECK((run.losses == runs[0].losses && run.norms == runs[0].norms));
        CHECK((run.everywhere == runs[0].everywhere));
        for (double loss : run.losses) CHECK(std::isfinite(loss));
    }
    return runs[0];
}

}  // namespace coat::test
