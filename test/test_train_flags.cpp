// test_train_flags.cpp - the flags of ./train. A flag that cannot be used gives one sentence with its name
// and exit code 1, and no file changes.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>

#include "../plan.h"
#include "program.h"
#include "token_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::token_files;

TEST_CASE("train: --help lists every flag, its default and the tables") {
    RunFolder folder;
    for (const char* flag : {"--help", "-h"}) {
        const Ended ended = train(folder, flag);
        CHECK(ended.code == 0);
        CHECK(ended.error.empty());
        for (const char* name :
             {"device",       "model",        "recipe",    "optimizer",               "attention",    "master",       "gradients", "data",       "batch",
              "seq",          "accumulate",   "steps",     "lr",        "warmup",     "schedule",
              "weight-decay", "clip",         "seed",      "out",       "save-every", "resume",
              "eval-every",   "sample-every", "prompt",    "log",       "plan",       "help",
              "ranks",        "temperature"})
            CHECK_MESSAGE(contains(ended.out, "\n  --" + std::string(name) + " "), name);
        for (const ModelConfig& c : models()) CHECK(contains(ended.out, "\n  " + c.name));
        for (const Recipe& r : recipes()) CHECK(contains(ended.out, "\n  " + std::string(r.name)));
        for (const OptimizerFormat& o : optimizers())
            CHECK(contains(ended.out, "\n  " + std::string(o.name)));
        for (const MemoryMode& mode : memory_modes())
            for (const Choice& choice : mode.choices)
                CHECK(contains(ended.out, "\n  " + std::string(choice.name) + " "));
    }
}

TEST_CASE("train: an unknown flag or value is rejected in one sentence") {
    RunFolder folder;
    const std::string cases[][2] = {
        {"--bacth 4", "--batch"},  // the nearest flag is suggested
        {"--resum out", "--resume"},
        {"text", "text"},
        {"-x", "-x"},
        {"--", "--"},
        {"--batch", "--batch"},
        {"--batch 2 --batch 3", "--batch"},
        {"--plan=1", "--plan"},
        {"--batch 0", "--batch"},
        {"--batch -1", "--batch"},
        {"--batch 2.5", "--batch"},
        {"--batch 1e3", "--batch"},
        {"--batch two", "--batch"},
        {"--batch ''", "--batch"},
        {"--batch 99999999999999999999999", "--batch"},
        {"--batch=0x10", "--batch"},
        {"--seq 0", "--seq"},
        {"--accumulate 0", "--accumulate"},
        {"--steps -5", "--steps"},
        {"--steps 18446744073709551617", "--steps"},
        {"--lr nan", "--lr"},
        {"--lr inf", "--lr"},
        {"--lr -1", "--lr"},
        {"--lr 1e400", "--lr"},
        {"--lr 1e", "--lr"},
        {"--lr 0.1x", "--lr"},
        {"--weight-decay -0.1", "--weight-decay"},
        {"--clip nan", "--clip"},
        {"--seed -1", "--seed"},
        {"--warmup x", "--warmup"},
        {"--device tpu", "--device"},
        {"--recipe fp9", "--recipe"},
        {"--optimizer sgd", "--optimizer"},
        {"--gradients none", "--clip 0"},
        {"--schedule step", "--schedule"},
        {"--attention fp8", "--attention"},
        {"--master bf16", "--master"},
        {"--gradients some", "--gradients"},
        {"--model llama-tinny", "--model"},
        {"--model nowhere/model", "--model"},
    };
    for (const auto& [flags, names] : cases) check_rejected(folder, flags, names);
    CHECK(train(folder, "--out").error == "train: --out needs a value after it.\n");
    const char* const number = "--batch needs a whole number from 1 to 1048576 after it.";
    CHECK(contains(train(folder, "--batch").error, number));
    // The reason follows in brackets.
    const bool no_gpu = contains(train(folder, "--plan").out, "  device         cpu (");
    if (no_gpu) check_rejected(folder, "--device gpu --data text", "--device gpu");
}

TEST_CASE("train: impossible shapes and sizes are rejected before anything is allocated") {
    RunFolder folder;
    fs::create_directory(folder.path / "empty");
    check_rejected(folder, "--device cpu --data text --model empty", "config.json");
    check_rejected(folder, "--device cpu --data text --seq 512", "--seq");  // llama-tiny has 256 positions
    check_rejected(folder, "--plan --model llama-3-8b --batch 4096 --seq 8192", "--batch");
    check_rejected(folder, "--plan --batch 65536 --seq 16", "--batch");
    check_rejected(folder, "--plan --recipe fp32 --attention groups", "--attention groups");
    check_rejected(folder, "--plan --recipe fp32 --master none", "--master none");
    check_rejected(folder, "--plan --gradients none --clip 0 --accumulate 2", "--accumulate 1");
    check_rejected(folder, "--device cpu --data text --model llama-30b --batch 4000 --seq 2048", "memory");
    check_rejected(folder,
                  "--device cpu --data text --batch 2 --seq 16 --prompt 'a prompt longer than sixteen'",
                  "--prompt");
    check_rejected(folder, "--device cpu --data text --batch 2 --seq 16 --prompt ''", "--prompt");
}

TEST_CASE("train: the memory of the CPU reference has all gradients in FP32, whatever the plan keeps") {
    RunFolder folder;
    const auto needs = [&](const std::string& flags) {
        const std::string run = "--device cpu --data text --model llama-30b --batch 4000 --seq 2048 " + flags;
        return number_after(train(folder, run).error, "This run needs ");
    };
    CHECK(needs("--gradients none --clip 0") == needs(""));
    const double batch = 7.0 * 2 * 4 * 4000 * 2048 / (1 << 20);  // of 7 micro-batches, in MiB
    CHECK(std::fabs(needs("--accumulate 8") - needs("") - batch) <= 1);
}

TEST_CASE("train: token files without a vocabulary give no samples, and a run that asks for them says so") {
    RunFolder folder;
    folder.write("tokens.bin", token_file(std::vector<uint16_t>(2000, 200)));
    const auto printed = [&](const std::string& flags) {
        const std::string run = "' --device cpu --data tokens.bin --batch 2 --seq 16 ";
        const Ended ended = shell(folder, "PATH=/nowhere '" + program() + run + flags);
        require_success(ended);
        return ended.out;
    };
    const auto says_so = [](const std::string& out) { return contains(out, "No samples will be printed"); };
    CHECK(says_so(printed("--steps 1")));
    CHECK(says_so(printed("--steps 0 --prompt x")));
    CHECK(!says_so(printed("--steps 1 --sample-every 0 --out other")));
    CHECK(!says_so(printed("--steps 0")));
    folder.write("out/step-000001/tokenizer.json", "{}");
    const std::string out = printed("--steps 0 --prompt x --model out/step-000001");
    CHECK(!says_so(out));
    CHECK(contains(out, "sample | step 0"));
}

TEST_CASE("train: --data that cannot be trained on is rejected") {
    RunFolder folder;
    folder.write("nothing", "");
    folder.write("short", "too few bytes for a batch");
    const std::string good = token_file(std::vector<uint16_t>{1, 2, 3});
    folder.write("cut.bin", with_word(good, 2, 1000));
    folder.write("magic.bin", with_word(good, 0, 12345678));
    folder.write("header.bin", "abc");
    folder.write("large.bin", token_file(std::vector<uint16_t>(60000, 50300)));
    fs::create_directory(folder.path / "hollow");
    const std::string tiny_run = "--device cpu --batch 2 --seq 16 --sample-every 0 --out '' --data ";
    for (const char* file : {"missing", "nothing", "short", "cut.bin", "magic.bin", "header.bin", "hollow"})
        check_rejected(folder, tiny_run + file, std::string(file) == "short" ? "--" : file);
    check_rejected(folder, tiny_run + "large.bin --model gpt2", "50300");  // gpt2 has 50257 tokens
}

TEST_CASE("train: the learning rate and weight decay follow their flags") {
    RunFolder folder;
    auto rates = [&](const std::string& flags) {
        require_success(tiny(folder, "--warmup 1 --lr 1e-2 --steps 4 --out '' --log log " + flags));
        std::vector<double> result;
        for (const auto& line : logged(folder, "step")) result.push_back(line.at("lr"));
        return result;
    };
    for (const Schedule& schedule : schedules()) {
        const std::vector<double> lr = rates(std::string("--schedule ") + schedule.name);
        REQUIRE(lr.size() == 4);
        for (int64_t step = 0; step < 4; step++)
            CHECK(lr[size_t(step)] == double(learning_rate(schedule, 1e-2, 1, 4, step)));
    }
    CHECK(rates("--schedule constant").back() > 2 * rates("--schedule linear").back());
    for (const char* decay : {"0", "1"})
        require_success(tiny(
            folder, std::string("--steps 2 --warmup 0 --weight-decay ") + decay + " --out decay" + decay));
    CHECK(weights_and_state(folder.path / "decay0/step-000002") !=
          weights_and_state(folder.path / "decay1/step-000002"));
}

TEST_CASE("train: README.md has what the plan says that memory flags save") {
    RunFolder folder;
    const auto total = [&](const std::string& flags) {
        const std::string out = train(folder, "--plan --model llama-2-7b --seq 2048 " + flags).out;
        return number_after(out, "\n  total                       ");
    };
    const std::string readme = read_file("README.md");
    for (const auto& [flags, batch, sign] :
         {std::tuple{"--attention groups", "8", -1}, {"--master none", "8", -1},
          {"--gradients none --clip 0", "8", -1}, {"--gradients none --clip 0", "1", -1}}) {
        const std::string with = std::string("--batch ") + batch + " ";
        const double gb = sign * (total(with + flags) - total(with)) * (1 << 20) / 1e9;  // the plan is in MiB
        char text[32];
        std::snprintf(text, sizeof text, "%.1f GB", gb);
        CAPTURE(flags);
        CAPTURE(text);
        CHECK(contains(readme, std::string(text) + (sign < 0 ? " less" : " more")));
    }
}

TEST_CASE("train: --plan prints the memory of COAT for Llama-2-7B without allocating it") {
    RunFolder folder;
    // The weights of 7B alone are 13 GB: with an address space of 1 GB none of them can be allocated.
    // Sanitizers need a larger address space.
    const std::string limit = std::getenv("UBSAN_OPTIONS") ? "" : "ulimit -v 1000000; ";
    const Ended ended =
        shell(folder, limit + "'" + program() + "' --plan --model llama-2-7b --batch 8 --seq 2048");
    CHECK(ended.code == 0);
    CHECK(number_after(ended.out, "saved activations: ") <= 16.5);
    CHECK(number_after(ended.out, "saved activations: ") >= 16.0);
    CHECK(number_after(ended.out, "optimizer states: ") <= 2.2);
    CHECK(number_after(ended.out, "optimizer states: ") >= 2.0);
    CHECK(contains(ended.out, "C bytes per token and layer"));
    CHECK(contains(ended.out, "bytes per parameter"));
    for (const ModelConfig& c : models())
        for (const Recipe& r : recipes())
            CHECK(
                train(folder, "--plan --batch 1 --seq 128 --model " + c.name + " --recipe " + r.name).code ==
                0);
    CHECK(folder.files().size() == 1);  // only "text"
}

TEST_CASE("train: --steps 0 evaluates and writes nothing") {
    RunFolder folder;
    const Ended ended = tiny(folder, "--steps 0");
    CHECK(ended.code == 0);
    // The loss of a model that was not trained.
    CHECK(number_after(ended.out, "validation | step 0 | loss ") ==
          doctest::Approx(std::log(256.0)).epsilon(0.05));
    CHECK(folder.files().size() == 1);
}
