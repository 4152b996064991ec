// train_flags.cpp - Flags (program/flags.h): which of several values a flag has, and what a resumed run does
// with it. What ./train says of wrong flags is in train_rejects.cpp.
#include "../common/known_models.h"
#include "../program/flags.h"
#include "help/files.h"

using namespace coat;
using namespace coat::test;

static Flags parsed(const std::vector<std::string>& arguments) {
    Flags flags;
    flags.parse(arguments);
    return flags;
}

TEST_CASE("Flags: each kind of value is read; only flags on the command line are given") {
    const Flags flags = parsed({"--model", "gpt2", "--batch=4", "--lr", "1e-2", "--plan", "--out", ""});
    CHECK(flags.model == "gpt2");
    CHECK(flags.batch == 4);
    CHECK(flags.lr == 1e-2);
    CHECK(flags.plan);
    CHECK(flags.out.empty());
    CHECK(flags.given("model"));
    CHECK(flags.given("batch"));
    CHECK(flags.given("plan"));
    CHECK(flags.given("out"));
    CHECK(!flags.given("seq"));
    CHECK(flags.seq == Flags().seq);
    CHECK(parsed({"--batch", "4", "--batch=5"}).batch == 5);
    CHECK(parsed({"--out=a=b"}).out == "a=b");
    CHECK(parsed({"--out", "--plan"}).out == "--plan");  // the value of a flag is whatever follows it
    const Flags help = parsed({"--batch", "4", "-h", "--no-such-flag"});
    CHECK(help.help);
    CHECK(help.batch == 4);
    CHECK(parsed({"--version", "text"}).version);
}

TEST_CASE("Flags: the numbers at their limits") {
    CHECK(parsed({"--batch", "2147483647"}).batch == INT32_MAX);
    CHECK(parsed({"--batch", "1"}).batch == 1);
    CHECK(parsed({"--steps", "0"}).steps == 0);
    CHECK(parsed({"--beta1", "0", "--beta2", "0.9999"}).beta2 == 0.9999);
    for (const auto& [flag, text] : {std::pair{"--batch", "0"},
                                     {"--batch", "2147483648"},
                                     {"--batch", "1e3"},
                                     {"--batch", " 1"},
                                     {"--batch", "1 "},
                                     {"--steps", "-1"},
                                     {"--lr", "-1e-9"},
                                     {"--lr", "inf"},
                                     {"--lr", "nan"},
                                     {"--lr", ""},
                                     {"--beta1", "-0.1"},
                                     {"--beta2", "1"}}) {
        const std::string name = flag, value = text;
        check_error([&] { parsed({name, value}); }, concat(name, " ", value, " is not a"));
    }
}

TEST_CASE("Flags: a given value stays; else a GPU's default comes before the standard one") {
    Flags flags = parsed({"--batch", "3"});
    flags.take_gpu_defaults();
    CHECK(flags.batch == 3);
    CHECK(flags.seq == 1024);
    CHECK(flags.model == "llama-30m");
    CHECK(flags.keep == 2);
}

TEST_CASE("default_learning_rate: ours for small models and GPT-3's rates for models of GPT-3's sizes") {
    for (const auto& [model, rate] : {std::pair{"llama-tiny", 3e-3},
                                      {"gpt2-tiny", 3e-3},
                                      {"llama-30m", 1e-3},
                                      {"gpt2", 6e-4},
                                      {"tinyllama-1.1b", 2e-4},
                                      {"llama-2-7b", 1.2e-4},
                                      {"llama-2-13b", 1e-4},
                                      {"llama-30b", 1e-4}}) {
        INFO(std::string(model));
        ModelConfig c = find_row(known_models(), model, "");
        if (c.V == 0) c.V = 50257;  // also with a large vocabulary a small model stays small
        CHECK(default_learning_rate(parameter_count(c)) == rate);
    }
    for (const auto& [millions, rate] : {std::pair{125, 6e-4},
                                         {350, 3e-4},
                                         {760, 2.5e-4},
                                         {1300, 2e-4},
                                         {2700, 1.6e-4},
                                         {6700, 1.2e-4},
                                         {13000, 1e-4}})
        CHECK(default_learning_rate(millions * int64_t{1'000'000}) == rate);
}

TEST_CASE("Flags: on a GPU the flags that are not given have larger defaults") {
    Flags flags = parsed({"--steps", "9"});
    flags.take_gpu_defaults();
    CHECK(flags.model == "llama-30m");
    CHECK(flags.batch == 32);
    CHECK(flags.seq == 1024);
    CHECK(flags.eval_tokens == 131072);
    CHECK(flags.steps == 9);
}

TEST_CASE("Flags: a checkpoint gives the values that are not given and refuses what would be another run") {
    const ordered_json saved =
        parsed({"--recipe", "te", "--lr", "0.5", "--steps", "9", "--keep", "7"}).saved_as_json();
    for (const char* of_this_start : {"device", "ranks", "out", "resume", "prompt", "plan"})
        CHECK(!saved.contains(of_this_start));
    Flags flags;
    CHECK(flags.take_checkpoint(saved).empty());
    CHECK(flags.recipe == "te");
    CHECK(flags.lr == 0.5);
    CHECK(flags.steps == 9);
    CHECK(flags.keep == 7);
    CHECK(flags.saved_as_json() == saved);

    Flags same = parsed({"--recipe", "te", "--lr", "5e-1", "--keep", "1"});  // --keep changes no step
    CHECK(same.take_checkpoint(saved).empty());
    CHECK(same.keep == 1);
    Flags changed = parsed({"--steps", "20", "--lr", "0.25"});
    CHECK(changed.take_checkpoint(saved) == "--steps 20 (before: 9), --lr 0.25 (before: 0.5)");
    CHECK(changed.steps == 20);
    CHECK(changed.lr == 0.25);
    Flags other = parsed({"--recipe", "coat"});
    check_error([&] { other.take_checkpoint(saved); },
                "--recipe \"coat\" differs from the checkpoint's \"te\"");
}
