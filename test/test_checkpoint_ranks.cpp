// test_checkpoint_ranks.cpp - checkpoints of several ranks: the files do not tell how many there were, so a
// run continues on another number of ranks with the same bits.
#include <doctest/doctest.h>

#include "program.h"
#include "several_ranks.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::several_ranks;

namespace {

Setup setup_of(const std::string& recipe, const Architecture& arch, int64_t accumulate) {
    Setup s = tiny_setup(tiny_config(arch, false), recipe, optimizer_of(recipe), 2, 16);
    s.accumulate = accumulate;
    return s;
}

std::string lines_with(const std::string& output, const std::string& begin) {  // up to their third " | "
    std::string found;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);)
        if (line.compare(0, begin.size(), begin) == 0) found += line.substr(0, line.find(" | lr")) + "\n";
    return found;
}

}  // namespace

TEST_CASE("checkpoint: several ranks write the files of one rank, and others continue with the same bits") {
    // One or two micro-batches at a time would be added in BF16 by recipe coat.
    check_checkpoints(setup_of("fp32", LLAMA, 12), 4, 3, make_reference);
    check_checkpoints(setup_of("coat", GPT2, 12), 2, 2, make_reference);
    check_checkpoints(setup_of("fp32", QWEN2, 12), 4, 3, make_reference);
}

TEST_CASE("train: a run stops on four ranks and continues on one and on two, bit for bit") {
    RunFolder folder;
    const std::string start = untied_model(folder, "fp32");
    const std::string flags = TINY + "--recipe fp32 --schedule constant --warmup 2 --model '" + start + "' ";
    require_success(train(folder, flags + "--accumulate 4 --steps 6 --out one"));
    require_success(train(folder, flags + "--ranks 4 --steps 2 --out parts"));
    require_success(train(folder, "--device cpu --resume parts --steps 4"));
    require_success(train(folder, "--device cpu --resume parts --ranks 2 --steps 6"));
    check_same_tensors(folder.path / "one/step-000006", folder.path / "parts/step-000006");
    const auto trainer = [&](const char* run) {
        auto json = nlohmann::json::parse(read_file(folder.path / run / "step-000006/trainer.json"));
        CHECK(nlohmann::json::parse(json["settings"].get<std::string>())["accumulate"] == "4");
        json.erase("run"), json.erase("settings");
        return json;
    };
    CHECK(trainer("one") == trainer("parts"));  // also the losses and the place in the data

    check_rejected(folder, "--device cpu --resume parts --ranks 3 --steps 9",
                   "4 micro-batches a step, which 3 ranks cannot share; use a number of ranks that "
                   "divides 4.");
    check_rejected(folder, "--device cpu --resume parts --ranks 2 --accumulate 4 --steps 9",
                   "--accumulate 4 on 2 ranks");
    check_rejected(folder, "--device cpu --resume parts --accumulate 2 --steps 9",
                   "differs from the checkpoint's 4");
}

TEST_CASE("train: a run of two ranks with --gradients none continues on two; on one the message says so") {
    RunFolder folder;
    require_success(train(folder, TINY + "--recipe coat --gradients none --clip 0 --ranks 2 --steps 1 --out two"));
    check_rejected(folder, "--device cpu --resume two --steps 2", "continue it with --ranks 2.");
    require_success(train(folder, "--device cpu --resume two --ranks 2 --steps 2"));
}

TEST_CASE("train: two ranks print, validate and log the same numbers, once") {
    RunFolder folder;
    const Ended ended =
        train(folder, "--recipe coat --batch 2 --seq 16 --steps 2 --eval-every 0 --out '' --device cpu "
                      "--data text --sample-every 2 --log log --ranks 2");
    require_success(ended);
    CHECK(ended.error == "");
    CHECK(contains(ended.out, "\n  ranks          2\n"));
    CHECK(contains(ended.out, "second moments"));
    CHECK(contains(ended.out, "expansion factor k of first moments"));
    const std::string steps = lines_with(ended.out, "step "),
                      validations = lines_with(ended.out, "validation | ");
    CHECK(std::count(steps.begin(), steps.end(), '\n') == 2);
    CHECK(std::count(validations.begin(), validations.end(), '\n') == 2);
    REQUIRE(logged(folder, "settings").size() == 1);
    CHECK(logged(folder, "settings")[0].at("ranks") == 2);
    REQUIRE(logged(folder, "step").size() == 2);
    for (const auto& line : logged(folder, "step")) {
        const double rate = line.at("tokens_per_second"), ms = line.at("ms");
        CHECK(rate * ms / 1e3 == doctest::Approx(2 * 2 * 16));  // tokens of both ranks
    }
    // The first validation shares its batches among the ranks, and has the bits of one rank's.
    const Ended one = tiny(folder, "--recipe coat --steps 0 --out ''");
    const std::string line = lines_with(one.out, "validation | "),
                      loss = line.substr(0, line.find(" | perplexity"));
    CHECK(loss != line);
    CHECK(validations.rfind(loss + "\n", 0) == 0);
}

TEST_CASE("train: --plan prints the memory of one of several ranks and starts none") {
    RunFolder folder;
    const Ended ended = train(folder, "--plan --ranks 8 --model llama-2-7b");
    require_success(ended);
    CHECK(contains(ended.out, "\n  ranks          8\n"));
    check_rejected(folder, "--plan --ranks 0", "--ranks");
    check_rejected(folder, "--plan --ranks 2 --optimizer fp8lm", "--optimizer fp8lm");
    require_success(train(folder, "--plan --ranks 1 --optimizer fp8lm"));
}
