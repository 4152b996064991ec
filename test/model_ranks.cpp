// model_ranks.cpp - a model on several ranks has the same bits every time, and trains as on one rank.
#include <dlfcn.h>

#include <set>

#include "help/program.h"
#include "help/ranks.h"

using namespace coat;
using namespace coat::test;

// Each gradient of an untied model is one sum. No number of ranks divides the units of all matrices.
static RunSettings small(const std::string& words, Architecture arch = LLAMA, int64_t accumulate = 1,
                         bool tied = false) {
    return settings_of(words, tiny_config(arch, tied), 2, 16, accumulate);
}

TEST_CASE("ranks: what one throws ends the others, and the test has its message") {
    const RunSettings s = small("fp32");
    check_error(
        [&] {
            with_ranks(s, 3, [&](const RunSettings& own) {
                if (own.rank == 1) throw Error("Rank 1 ends here.");
                RankTraining(make_reference_model, own).step();  // waits for gradients of rank 1
            });
        },
        "Rank 1 ends here.");
}

RANKS_PROPERTY("with FP32 sums R ranks have the bits of one rank with R times the micro-batches") {
    // The micro-batches of each rank; the number of ranks; whether targets are masked
    std::vector<std::tuple<const char*, Architecture, int64_t, int64_t, bool>> rows = {
        {"fp32", LLAMA, 1, 2, false}, {"fp32", LLAMA, 1, most, false},
        {"fp32", GPT2, 2, 3, false},  {"bf16", GPT2, 5, 2, false},
        {"coat", QWEN3, 3, 2, false}, {"coat attention master", QWEN2, 1, 5, false},
        {"fp32", LLAMA, 2, 2, true},  {"coat", LLAMA, 5, 2, true}};
    if (make == make_gpu_model)
        for (const char* recipe : {"fp32", "bf16", "coat", "rowwise", "deepseek", "colossal"})
            for (int64_t ranks : {2, 3, 4, 8})
                rows.emplace_back(recipe, LLAMA, ceil_div(5, ranks), ranks, ranks == 2);
    std::set<int64_t> left_out;  // numbers of ranks for which there are too few GPUs
    for (const auto& [recipe, arch, each, ranks, masked] : rows) {
        if (make == make_gpu_model && ranks > most) {
            left_out.insert(ranks);
            continue;
        }
        const RunSettings s = small(recipe, arch, each);
        const RunSettings one = small(recipe, arch, each * ranks);
        INFO(text(s), ", ", ranks, " ranks, masked: ", masked);
        REQUIRE(gradient_format(one) == Format::FP32);
        const RankRun got = train_ranks(make, s, ranks, 3, masked);
        check_same(got, train_ranks(make, one, 1, 3, masked));
    }
    for (int64_t ranks : left_out) MESSAGE(ranks, " ranks were left out: there are ", most, " GPUs");
}

RANKS_PROPERTY("the same bits every time in every recipe and mode") {
    SEEDED_RANDOM(rng);
    std::vector<RunSettings> list = {small("te master"), small("coat", GPT2, 1, true)};
    if (make == make_gpu_model) {
        list = all_settings(rng);
        list.push_back(settings_of("coat", wide_heads(false), 2, 128));
    }
    FOR_ALL_SETTINGS(s, list) {
        RunSettings shared = s;
        shared.ranks = 2;
        if (!supported(shared)) continue;  // moments with one scale per tensor
        const int64_t ranks = 2 + rng.below(most - 1);
        CAPTURE(ranks);
        check_same(train_ranks(make, s, ranks, 3), train_ranks(make, s, ranks, 3));
    }
}

RANKS_PROPERTY("they write the checkpoints of one rank and fewer of them continue with the same bits") {
    const int64_t fewer = std::max<int64_t>(1, most - 1);
    for (const auto& [words, arch] :
         {std::pair{"fp32", LLAMA}, {"coat", GPT2}, {"fp32", QWEN3}, {"coat moments fp8", LLAMA}}) {
        INFO(words, ", ", std::string(arch.name), ", ", most, " ranks");
        Folder folder;
        const int64_t parts = round_up(5, most * fewer);  // micro-batches; more than four: FP32 sums
        RunSettings settings = small(words, arch);
        // Two steps, after which the run is saved to `to`; or those that follow, after loading `from`.
        auto part = [&](int64_t ranks, const std::string& from, const std::string& to) {
            Snapshot state;
            settings.micro_batches_per_rank = parts / ranks;
            with_ranks(settings, ranks, [&](const RunSettings& own) {
                RankTraining t(make, own);
                if (!from.empty()) {
                    load_checkpoint(from, *t.model);
                    for (; t.adamw.update_number < 2; t.adamw.update_number++)
                        t.next();  // the data of the steps before
                }
                for (int i = 0; i < 2; i++) t.next(), t.again();
                if (!to.empty())
                    save_checkpoint(folder / to, *t.model,
                                    {t.adamw.update_number, t.adamw.update_number, 0, {}});
                const Snapshot whole = t.whole(state_tensors(own));
                if (own.rank == 0) state = whole;
            });
            return state;
        };
        part(1, "", "one"), part(most, "", "several");
        const std::string one = folder / "one/step-000002", several = folder / "several/step-000002";
        CHECK((tensors_of(several) == tensors_of(one)));
        CHECK((part(fewer, several, "") == part(1, one, "")));
    }
}

// One rank's tokens make the loss NaN; or only one rank has targets, and a gradient that becomes infinite
// within backward and saturates as E5M2 codes: that rank alone sees it.
RANKS_PROPERTY("a value that is not finite on one rank skips the step on all") {
    for (const bool hidden : {false, true})
        with_ranks(small("coat"), most, [&](const RunSettings& own) {
            const std::unique_ptr<Model> model = make(own);
            const Tokens fine(own.B * own.T, 3), bad(fine.size(), 0), none(fine.size(), NO_TARGET);
            Snapshot state = snapshot(*model), good = state;
            const Param p =
                parameters(own.config)[param_index_of(parameters(own.config), "layers.1.gate_up")];
            const Range rows = owned(own, p);
            if (hidden) {  // gates are 0 and ups are large: the gradients of gates are infinite
                const int64_t gates = std::clamp<int64_t>(p.size() / 2 - rows.first, 0, rows.count);
                set_weights(state, p.name, 0, 0, gates);
                set_weights(state, p.name, 0x1p100f, gates);
                set_weights(state, "layers.1.down", 0x1p120f);
            } else if (const Range here = owned(own, weight_tensors(own.config)[0]); here.first == 0)
                set_weights(state, "embedding", NAN, 0, std::min(own.config.C, here.count));
            restore(*model, state);
            const bool me = own.rank == 1;
            const StepResult r = model->step((me && !hidden ? bad : fine).data(),
                                             (me || !hidden ? fine : none).data(), {1, 1e-3f});
            if (!r.skipped || snapshot(*model) != state) throw Error("The step was not skipped.");
            restore(*model, good);
            const StepResult done = model->step(fine.data(), fine.data(), {1, 0.1f});
            if (done.skipped || snapshot(*model) == good) throw Error("A good step was skipped.");
        });
}

RANKS_PROPERTY("loaded weights are whole on all ranks; they evaluate and generate and report as one does") {
    for (const char* words : {"fp32", "coat", "te"}) {
        CAPTURE(words);
        const RunSettings s = small(words);
        Training trained(make, s);
        trained.step();
        const Snapshot state = snapshot(*trained.model);
        const double loss = trained.validation_loss();
        const Floats logits = trained.next_logits(7);
        const QuantReport report = trained.report();
        std::vector<QuantReport> reports{size_t(most)};
        with_ranks(s, most, [&](const RunSettings& own) {
            RankTraining t(make, own);
            for (const StateTensor& tensor : state_tensors(own))
                t.model->write(tensor.name,
                               state.at(tensor.name).data() + owned(own, tensor).first * tensor.bytes);
            t.tokens = trained.tokens, t.targets = trained.targets;
            if (t.validation_loss() != loss || t.next_logits(7) != logits) throw Error(own.rank, " differs.");
            reports[size_t(own.rank)] = t.report();
        });
        for (int kind = 0; kind < int(MeasuredKind::Count); kind++) {
            INFO(std::string(MEASURED_KIND_NAMES[kind]));
            const QuantStats& one = report.stats_by_kind[kind];
            QuantStats sum;
            for (const QuantReport& r : reports) sum += r.stats_by_kind[kind];
            if (kind >= int(MeasuredKind::Moment1))
                CHECK(sum.elements == one.elements);  // each reports its own
            else if (one.elements > 0) {
                const QuantStats& other = reports.back().stats_by_kind[kind];
                CHECK(other.snr_db() == doctest::Approx(one.snr_db()).epsilon(0.01));
                if (kind != int(MeasuredKind::Weight))  // gathered once where used twice
                    CHECK(other.elements == one.elements);
            }
        }
        size_t moment_groups = 0;
        for (const QuantReport& r : reports) moment_groups += r.k_m.size();
        CHECK(moment_groups == report.k_m.size());
    }
}

TEST_CASE("ranks: a sum in BF16 or of a tied embedding is that of the ranks' gradients rounded once") {
    for (const std::string recipe : {"bf16", "coat", "fp32"}) {
        CAPTURE(recipe);
        const RunSettings s = small(recipe, LLAMA, 1, recipe == "fp32");
        const Format format = gradient_format(small(recipe, LLAMA, 4, recipe == "fp32"));
        REQUIRE(format == s.recipe.compute_format);
        const RankRun four = train_ranks(make_reference_model, s, 4, 1);
        Training t(make_reference_model, s);
        t.adamw.lr = 0;  // each rank computes with the first weights
        std::vector<std::vector<Floats>> of_ranks;
        for (int rank = 0; rank < 4; rank++) {
            t.step();
            of_ranks.push_back(gradients_of(*t.model));  // of a fourth of the targets
        }
        const std::vector<Param> params = t.params();
        for (size_t p = 0; p < params.size(); p++) {
            Floats sum;
            for (size_t i = 0; i < of_ranks[0][p].size(); i++) {
                float x = 0;
                for (const auto& gradients : of_ranks) x += gradients[p][i] / 4;
                sum.push_back(reference::round_to(format, x));
            }
            CHECK_MESSAGE(values_of<float>(four.gradients, params[p].name + ".gradient") == sum,
                          params[p].name);
        }
    }
}

TEST_CASE("ranks: delayed scales come from the amaxes of all ranks") {
    const RunSettings s = small("te");
    const RankRun three = train_ranks(make_reference_model, s, 3, 1),
                  one = train_ranks(make_reference_model, small("te", LLAMA, 3), 1, 1);
    for (const StateTensor& t : delayed_scaling_tensors(s.config, s.recipe))  // these depend on no scales
        if (t.name.rfind("layers.0.qkv", 0) == 0 && !contains(t.name, suffix_of(OperandKind::G)))
            CHECK_MESSAGE((three.state.at(t.name) == one.state.at(t.name)), t.name);
}

TEST_CASE("gpu: ranks: NCCL and the copy engines give the same bits" *
          doctest::skip(number_of_gpus() < 2 || !dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL))) {
    const RunSettings s = small("coat", GPT2, 1, true);
    const RankRun copies = train_ranks(make_gpu_model, s, 2, 3);
    setenv("COAT_NCCL", "libnccl.so.2", 1);
    const RankRun nccl = train_ranks(make_gpu_model, s, 2, 3);
    unsetenv("COAT_NCCL");
    check_same(copies, nccl);
}

GPU_MODEL_TEST("ranks: processes that share one GPU have the bits of one with as many micro-batches") {
    setenv("COAT_SHARE_GPU", "1", 1);
    for (const std::string recipe : {"coat", "coat --master none", "bf16", "te"}) {
        CAPTURE(recipe);
        RunFolder folder;
        RunSettings s = settings_of("fp32", find_row(known_models(), "llama-tiny", ""), 2);
        s.config.V = 256, s.config.tied = false;
        const std::string start = save_checkpoint(folder / "start", *make_reference_model(s), {});
        const std::string flags = concat(
            "--device gpu --data text --batch 2 --seq 16 --sample-every 0 --eval-tokens 320 --warmup 1 "
            "--model ",
            start, " --recipe ", recipe, " ");
        if (recipe == "te") {  // before a first step with delayed scaling, the report counts a weight once
            auto weights = [&](const std::string& more) {
                const std::string out = train(folder, flags + "--steps 0 " + more).out;
                REQUIRE(contains(out, "\nweights  "));
                return number_after(out.substr(out.find("\nweights  ")), "dB |");
            };
            CHECK((weights("") > 0 && weights("--ranks 2") == weights("")));
            continue;
        }
        require_success(train(folder, flags + "--steps 3 --accumulate 12 --out one"));
        for (int ranks : {2, 3, 4}) {
            const std::string out = concat("ranks", ranks);
            require_success(train(folder, concat(flags, "--steps 3 --out ", out, " --ranks ", ranks,
                                                 " --accumulate ", 12 / ranks)));
            CHECK((tensors_of(folder / out + "/step-000003") == tensors_of(folder / "one/step-000003")));
        }
    }
    unsetenv("COAT_SHARE_GPU");
}

// Within the report a rank waits for weights that another one sends: it must look whether that still lives.
GPU_MODEL_TEST("ranks: one that is killed while the report is measured ends the run") {
    setenv("COAT_SHARE_GPU", "1", 1);
    RunFolder folder;
    const Ended ended = run_with_action(
        folder,
        "--device gpu --data text --model llama-30m --batch 8 --seq 256 --eval-tokens 2048 --steps 0 "
        "--out '' --ranks 2",
        "validation | step 0", "kill -KILL $others");
    unsetenv("COAT_SHARE_GPU");
    check_one_sentence(ended, "Rank 1 has ended unexpectedly");
}
