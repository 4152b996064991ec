// several_ranks.h - ranks as threads of one process, each with a CPU reference: they train a tiny model, and
// the test sees the whole tensors.
#pragma once
#include <atomic>
#include <deque>
#include <exception>
#include <thread>
#include <omp.h>
#include <sys/socket.h>

#include "../../data/checkpoint.h"
#include "../../program/ranks.h"
#include "files.h"
#include "tiny.h"

namespace coat::test::several_ranks {

// Calls body(setup) for every rank, each in its thread. One rank has none beside it, as in ./train.
inline void with_ranks(const Setup& setup, int64_t ranks, const std::function<void(const Setup&)>& body) {
    std::vector<std::vector<int>> sockets(size_t(ranks), std::vector<int>(size_t(ranks), -1));
    for (size_t rank = 1; rank < sockets.size(); rank++) {
        int ends[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        sockets[0][rank] = ends[0], sockets[rank][0] = ends[1];
    }
    std::vector<std::thread> threads;
    std::deque<std::string> errors(static_cast<size_t>(ranks));
    for (int64_t rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            omp_set_num_threads(1);
            Setup own = setup;
            own.rank = rank, own.ranks = ranks;
            try {
                std::unique_ptr<ProcessGroup> processes;
                if (ranks > 1) processes = std::make_unique<ProcessGroup>(rank, rank, sockets[size_t(rank)]);
                own.processes = processes.get();
                try {
                    body(own);
                } catch (const std::exception& error) {  // it ends this process before the test can tell
                    std::fprintf(stderr, "rank %d: %s\n", int(rank), error.what());
                    throw;
                }
            } catch (const std::exception& error) {  // the destructor of ProcessGroup has ended the others
                errors[size_t(rank)] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) REQUIRE(error == "");
}

inline Snapshot whole_tensors(Model& model, const std::vector<StateTensor>& table) {
    Snapshot bytes;
    for (const StateTensor& t : table) bytes[t.name] = whole_tensor(model, t);
    return bytes;
}

inline std::vector<StateTensor> gradient_tensors(const ModelConfig& config) {
    std::vector<StateTensor> table;
    const std::vector<Param> params = parameters(config);
    for (size_t i = 0; i < params.size(); i++)
        table.push_back({params[i].name + ".gradient", "F32", 4, {params[i].size()}, i});
    return table;
}

// Takes the micro-batches of this rank out of those of all.
inline std::vector<int32_t> own_part(const Setup& s, const std::vector<int32_t>& all) {
    const int64_t N = s.B * s.T;
    std::vector<int32_t> own;
    for (int64_t a = 0; a < s.accumulate; a++) {
        const auto begin = all.begin() + (a * s.ranks + s.rank) * N;
        own.insert(own.end(), begin, begin + N);
    }
    return own;
}

// The training text, from its beginning on.
struct RankTraining {
    Model& model;
    Text text;
    bool masked;
    AdamW adamw{0, 3e-3f};
    explicit RankTraining(Model& m, bool some = false) : model(m), text(1, m.setup().config.V), masked(some) {
        if (!m.setup().keep_gradients) adamw.clip = 0;
    }
    StepResult step() {
        const Setup& s = model.setup();
        std::vector<int32_t> tokens, targets;
        text.next(s.accumulate * s.ranks * s.B, s.T, &tokens, &targets);
        if (masked) mask_unevenly(&targets, s.B * s.T);
        adamw.step++;
        return model.step(own_part(s, tokens).data(), own_part(s, targets).data(), adamw);
    }
};

// What a run leaves: its steps, as each rank saw them, and the tensors.
struct Run {
    std::vector<double> losses, norms;
    Snapshot state, gradients;
    bool operator==(const Run& o) const {
        return losses == o.losses && norms == o.norms && state == o.state && gradients == o.gradients;
    }
};

inline Run train_ranks(const Setup& setup, int64_t ranks, int steps,
                       std::unique_ptr<Model> (*make)(const Setup&) = make_reference, bool masked = false) {
    std::vector<Run> runs(static_cast<size_t>(ranks));
    with_ranks(setup, ranks, [&](const Setup& own) {
        const std::unique_ptr<Model> model = make(own);
        RankTraining training(*model, masked);
        Run& run = runs[size_t(own.rank)];
        for (int i = 0; i < steps; i++) {
            const StepResult result = training.step();
            run.losses.push_back(result.skipped ? NAN : result.loss);
            run.norms.push_back(result.grad_norm);
        }
        if (own.keep_gradients) run.gradients = whole_tensors(*model, gradient_tensors(own.config));
        run.state = whole_tensors(*model, state_tensors(own));
    });
    for (const Run& run : runs) {
        CHECK(run.losses == runs[0].losses);
        CHECK(run.norms == runs[0].norms);
        for (double loss : run.losses) CHECK(std::isfinite(loss));
    }
    return runs[0];
}

// A checkpoint of a new llama-tiny, but with a head of its own: then each gradient is one sum.
inline std::string untied_model(const Folder& folder, const char* recipe) {
    Setup setup{find_row(models(), "llama-tiny", ""), find_row(recipes(), recipe, ""),
                find_row(optimizers(), optimizer_of(recipe), ""), 2, 16};
    setup.config.V = 256, setup.config.tied = false;
    return save_checkpoint(folder / "start", *make_reference(setup), {});
}

inline void check_same_tensors(const fs::path& a, const fs::path& b) {
    for (const char* file : {"model.safetensors", "optimizer.state"}) {
        CAPTURE(file);
        REQUIRE(fs::exists(a / file));
        CHECK((read_file(a / file) == read_file(b / file)));
    }
}

// Checkpoints of `ranks` ranks are those of one rank with as many micro-batches a step (setup.accumulate),
// and `fewer` ranks continue from them with the same bits.
inline void check_checkpoints(const Setup& setup, int64_t ranks, int64_t fewer,
                              std::unique_ptr<Model> (*make)(const Setup&)) {
    CAPTURE(setup.recipe.name);
    CAPTURE(ranks);
    Folder folder;
    LoopState state;
    state.step = state.updates = 2;
    const auto share = [&](int64_t n) {
        Setup s = setup;
        s.accumulate = setup.accumulate / n;
        return s;
    };
    Snapshot last;
    {
        const std::unique_ptr<Model> one = make(setup);
        RankTraining training(*one);
        training.step(), training.step();
        save_checkpoint(folder / "one", *one, state);
        training.step(), training.step();
        last = snapshot(*one);
    }
    std::vector<std::string> saved(static_cast<size_t>(ranks));
    with_ranks(share(ranks), ranks, [&](const Setup& s) {
        const std::unique_ptr<Model> model = make(s);
        RankTraining training(*model);
        training.step(), training.step();
        saved[size_t(s.rank)] = save_checkpoint(folder / "several", *model, state);
    });
    for (const std::string& path : saved) CHECK(path == folder / "several/step-000002");
    check_same_tensors(folder.path / "one/step-000002", saved[0]);

    Snapshot continued;
    with_ranks(share(fewer), fewer, [&](const Setup& s) {
        const std::unique_ptr<Model> model = make(s);
        load_checkpoint(saved[0], *model);
        RankTraining rest(*model);
        std::vector<int32_t> unused;  // of the steps before
        for (int i = 0; i < 2; i++) rest.text.next(setup.accumulate * s.B, s.T, &unused, &unused);
        rest.adamw.step = 2;
        rest.step(), rest.step();
        const Snapshot mine = whole_tensors(*model, state_tensors(s));
        if (s.rank == 0) continued = mine;
    });
    CHECK((continued == last));
}

}  // namespace coat::test::several_ranks
