// test_program.cpp - the program as a user meets it: ./train runs in a folder of its own, and what it prints, leaves behind and
// exits with is looked at. Bad input first: each gets one sentence that names the file or flag, exit code 1, and no file is
// lost or half-written. Then the plan, whose functions are also tested by themselves.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../data/checkpoint.h"
#include "../plan.h"
#include "program.h"

using namespace coat;
using namespace coat::test;
namespace fs = std::filesystem;

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("program: --help lists every flag, its default and the tables") {
    Folder folder;
    for (const char* flag : {"--help", "-h"}) {
        const Ended ended = train(folder, flag);
        CHECK(ended.code == 0);
        CHECK(ended.error.empty());
        for (const char* name : {"device", "model", "recipe", "optimizer", "m-format", "v-format", "attention", "master", "gradients", "recompute",
                                 "data", "batch", "seq", "accumulate", "steps",
                                 "lr", "warmup", "schedule", "weight-decay", "clip", "seed", "out", "save-every", "resume", "eval-every",
                                 "sample-every", "prompt", "log", "plan", "help"})
            CHECK_MESSAGE(ended.out.find("\n  --" + std::string(name) + " ") != std::string::npos, name);
        for (const ModelConfig& c : models()) CHECK(ended.out.find("\n  " + c.name) != std::string::npos);
        for (const Recipe& r : recipes()) CHECK(ended.out.find("\n  " + std::string(r.name)) != std::string::npos);
        for (const OptimizerFormat& o : optimizers()) CHECK(ended.out.find("\n  " + std::string(o.name)) != std::string::npos);
        for (const MemoryMode& mode : memory_modes())
            for (const Choice& choice : mode.choices) CHECK(ended.out.find("\n  " + std::string(choice.name) + " ") != std::string::npos);
    }
}

TEST_CASE("program: a flag or a value that is not known is refused in one sentence") {
    Folder folder;
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
        {"--m-format int8", "--m-format"},
        {"--v-format e3m4", "--v-format"},
        {"--schedule step", "--schedule"},
        {"--attention fp8", "--attention"},
        {"--master bf16", "--master"},
        {"--gradients some", "--gradients"},
        {"--recompute yes", "--recompute"},
        {"--model llama-tinny", "--model"},
        {"--model nowhere/model", "--model"},
    };
    for (const auto& [flags, names] : cases) check_refused(folder, flags, names);
    const bool no_gpu = train(folder, "--plan").out.find("  device         cpu (") != std::string::npos;  // and why
    if (no_gpu) check_refused(folder, "--device gpu --data text", "--device gpu");
}

TEST_CASE("program: shapes and sizes that cannot work are refused before anything is allocated") {
    Folder folder;
    fs::create_directory(folder.path / "empty");
    check_refused(folder, "--device cpu --data text --model empty", "config.json");
    check_refused(folder, "--device cpu --data text --seq 512", "--seq");  // llama-tiny has 256 positions
    check_refused(folder, "--plan --model llama-3-8b --batch 4096 --seq 8192", "--batch");
    check_refused(folder, "--plan --batch 65536 --seq 16", "--batch");
    check_refused(folder, "--plan --recipe fp32 --attention groups", "--attention groups");
    check_refused(folder, "--plan --recipe fp32 --master none", "--master none");
    check_refused(folder, "--plan --gradients none --accumulate 2", "--accumulate 1");
    check_refused(folder, "--device cpu --data text --model llama-30b --batch 4000 --seq 2048", "memory");
    check_refused(folder, "--device cpu --data text --batch 2 --seq 16 --prompt 'a prompt longer than sixteen'", "--prompt");
    check_refused(folder, "--device cpu --data text --batch 2 --seq 16 --prompt ''", "--prompt");
}

TEST_CASE("program: data that cannot be trained on is refused") {
    Folder folder;
    write_file(folder.path / "nothing", "");
    write_file(folder.path / "short", "too few bytes for a batch");
    write_file(folder.path / "cut.bin", token_file(20240520, 1000, {1, 2, 3}));
    write_file(folder.path / "magic.bin", token_file(12345678, 3, {1, 2, 3}));
    write_file(folder.path / "header.bin", std::string("abc"));
    write_file(folder.path / "large.bin", token_file(20240520, 60000, std::vector<uint16_t>(60000, 50300)));
    fs::create_directory(folder.path / "hollow");
    const std::string tiny_run = "--device cpu --batch 2 --seq 16 --sample-every 0 --out '' --data ";
    for (const char* file : {"missing", "nothing", "short", "cut.bin", "magic.bin", "header.bin", "hollow"})
        check_refused(folder, tiny_run + file, std::string(file) == "short" ? "--" : file);
    check_refused(folder, tiny_run + "large.bin --model gpt2", "50300");  // gpt2 has 50257 tokens
}

TEST_CASE("program: a folder or file that cannot be written is refused before training") {
    Folder folder;
    check_refused(folder, TINY + std::string("--steps 2 --out text/out"), "--out");
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log nowhere/log"), "--log");
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log /"), "--log");
}

TEST_CASE("program: a full disk leaves no half-written checkpoint, and keeps the one before") {
    Folder folder;
    const std::string run = "'" + program() + "'" + TINY;
    // A limit on the size of a file stands for the disk: a checkpoint of the tiny model has files of more than a megabyte.
    check_one_sentence(shell(folder, "ulimit -f 100; " + run + "--steps 2 --out full"), "full");
    CHECK((!fs::exists(folder.path / "full") || fs::is_empty(folder.path / "full")));
    require_success(tiny(folder, "--steps 2 --schedule constant --out kept"));
    const auto before = folder.files();
    check_one_sentence(shell(folder, "ulimit -f 100; '" + program() + "' --device cpu --resume kept --steps 4"), "kept");
    CHECK(folder.files() == before);
    const Ended logged = shell(folder, "ulimit -f 1; " + run + "--steps 2 --out '' --log log > /dev/null");  // the run is worth more than its log
    CHECK(logged.code == 0);
    CHECK(logged.error.compare(0, 16, "train: --log log") == 0);
    CHECK(logged.error.find('\n') == logged.error.size() - 1);
}

TEST_CASE("program: a log takes the place of another log and of nothing else") {
    Folder folder;
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log text"), "--log");  // the text that it would train on
    require_success(tiny(folder, "--steps 4 --out '' --log log"));
    require_success(tiny(folder, "--steps 2 --out '' --log log"));
    CHECK(read_file(folder.path / "log").find("\"step\":4") == std::string::npos);
    const Ended piped = shell(folder, "'" + program() + "'" + TINY + "--steps 2 --out '' --log /dev/stdout | cat");
    CHECK(piped.out.find("{\"kind\":\"settings\"") != std::string::npos);
}

TEST_CASE("program: what flags, paths and files say is told on one line, and without what moves a terminal") {
    Folder folder;
    check_refused(folder, "--device cpu --recipe \"$(printf 'a\\nb\\033[31mc')\"", "a\\nb?[31mc");
    check_refused(folder, "--device cpu --resume \"$(printf 'a\\nb')\"", "a\\nb");
    check_refused(folder, "--device cpu --resume ''", "--resume");
    // A model that has learnt nothing writes bytes of all kinds.
    const Ended sampled = train(folder, "--device cpu --data text --batch 2 --seq 256 --steps 1 --lr 0 --eval-every 0 --sample-every 1 --out ''");
    require_success(sampled);
    CHECK(sampled.out.find("\xEF\xBF\xBD") != std::string::npos);
    CHECK(std::none_of(sampled.out.begin(), sampled.out.end(), [](unsigned char c) { return (c < 32 && c != '\n' && c != '\t') || c == 127; }));
}

TEST_CASE("program: a folder belongs to one run at a time") {
    Folder folder;
    const std::string run = "'" + program() + "'" + TINY;
    const Ended second = shell(folder, run + "--steps 100000 --out shared > /dev/null & first=$!\n"
                                       "while [ ! -e shared ]; do sleep 0.05; done; sleep 0.3\n" +
                                       run + "--steps 2 --out shared > /dev/null; code=$?; kill -INT $first; wait $first; exit $code");
    check_one_sentence(second, "--out shared");
    require_success(tiny(folder, "--steps 2 --out other"));
}

TEST_CASE("program: checkpoints come as often as they are wanted, and the newest stays") {
    Folder folder;
    const Ended ended = tiny(folder, "--steps 5 --save-every 2 --out often");
    require_success(ended);
    for (const char* step : {"2", "4", "5"}) CHECK(ended.out.find("saved | step " + std::string(step) + " | ") != std::string::npos);
    CHECK(!fs::exists(folder.path / "often/step-000004"));
    CHECK(fs::exists(folder.path / "often/step-000005"));
}

TEST_CASE("program: a run that blows up ends, in a sentence, and its last good checkpoint stays") {
    Folder folder;
    const Ended ended = tiny(folder, "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 --eval-every 0 --save-every 2 --out wild");
    check_one_sentence(ended, "20 steps in a row");
    const size_t skipped = ended.out.find("skipped: not finite (1 so far)");
    REQUIRE(skipped != std::string::npos);
    CHECK(ended.out.find("saved | ") < skipped);
    CHECK(ended.out.find("saved | ", skipped) == std::string::npos);
}

TEST_CASE("program: the learning rate follows its flags, and weight decay decays") {
    Folder folder;
    auto rates = [&](const std::string& flags) {
        require_success(tiny(folder, "--warmup 1 --lr 1e-2 --steps 4 --out '' --log log " + flags));
        std::vector<double> result;
        std::istringstream log(read_file(folder.path / "log"));
        for (std::string line; std::getline(log, line);)
            if (const auto told = nlohmann::json::parse(line); told.at("kind") == "step") result.push_back(told.at("lr"));
        return result;
    };
    for (const Schedule& schedule : schedules()) {
        const std::vector<double> told = rates(std::string("--schedule ") + schedule.name);
        REQUIRE(told.size() == 4);
        for (int64_t step = 0; step < 4; step++) CHECK(told[size_t(step)] == double(learning_rate(schedule, 1e-2, 1, 4, step)));
    }
    CHECK(rates("--schedule constant").back() > 2 * rates("--schedule linear").back());
    for (const char* decay : {"0", "1"}) require_success(tiny(folder, std::string("--steps 2 --warmup 0 --weight-decay ") + decay + " --out decay" + decay));
    CHECK(weights_and_state(folder.path / "decay0/step-000002") != weights_and_state(folder.path / "decay1/step-000002"));
}

TEST_CASE("program: a checkpoint that is missing, damaged or of another run is refused") {
    Folder folder;
    check_refused(folder, "--device cpu --resume nowhere", "nowhere");
    fs::create_directory(folder.path / "hollow");
    check_refused(folder, "--device cpu --resume hollow", "hollow");
    require_success(tiny(folder, "--steps 2"));  // into out/
    const std::string resume = "--device cpu --resume out --steps 4 ";
    check_refused(folder, resume + "--recipe fp32", "--recipe");
    check_refused(folder, resume + "--optimizer fp8", "--optimizer");
    check_refused(folder, resume + "--m-format e5m2", "--m-format");
    check_refused(folder, resume + "--attention groups", "--attention");
    check_refused(folder, resume + "--master none", "--master");
    check_refused(folder, resume + "--gradients none", "--gradients");
    check_refused(folder, resume + "--model gpt2-tiny", "--model");
    check_refused(folder, resume + "--batch 4", "--batch");
    check_refused(folder, resume + "--seq 32", "--seq");
    check_refused(folder, resume + "--lr 1e-4", "--lr");
    check_refused(folder, resume + "--seed 2", "--seed");
    check_refused(folder, "--device cpu --resume out --steps 1", "--steps");
    check_refused(folder, "--device cpu --resume out", "--steps");
    check_refused(folder, TINY + std::string("--steps 2"), "--out");  // would replace another run's checkpoint
    const std::string text = read_file(folder.path / "text");
    write_file(folder.path / "other", std::string(50000, 'a'));
    check_refused(folder, resume + "--data other", "--data");
    write_file(folder.path / "turned", std::string(text.rbegin(), text.rend()));  // as many tokens, but other ones
    check_refused(folder, resume + "--data turned", "--data");
    CHECK(train(folder, "--device cpu --plan --resume out").code == 0);  // of a finished run, too

    const fs::path checkpoint = folder.path / "out" / "step-000002";
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"}) {
        const std::string whole = read_file(checkpoint / file);
        for (const std::string& damaged : {whole.substr(0, whole.size() / 2), std::string(), std::string("[]")}) {
            write_file(checkpoint / file, damaged);
            check_refused(folder, "--device cpu --resume out/step-000002 --steps 4", "step-000002");
        }
        fs::remove(checkpoint / file);
        check_refused(folder, "--device cpu --resume out/step-000002 --steps 4", "step-000002");
        write_file(checkpoint / file, whole);
    }
    CHECK(train(folder, resume).code == 0);  // whole again

    require_success(tiny(folder, "--gradients none --steps 2 --out lean"));
    const fs::path trainer = folder.path / "lean/step-000002/trainer.json";
    std::string state = read_file(trainer);
    write_file(trainer, state.replace(state.find("\"growth\": ["), 11, "\"growth\": [1.5, "));  // of a unit that the model has not
    check_refused(folder, "--device cpu --resume lean --steps 4", "growth");
}

TEST_CASE("program: weights that are not finite are refused at the first validation") {
    Folder folder;
    require_success(tiny(folder, "--steps 1 --out good"));
    fs::copy(folder.path / "good" / "step-000001", folder.path / "bad");
    std::string weights = read_file(folder.path / "bad" / "model.safetensors");
    std::fill(weights.end() - 2000, weights.end(), '\xFF');  // BF16's NaN
    write_file(folder.path / "bad" / "model.safetensors", weights);
    check_refused(folder, TINY + std::string("--steps 2 --out '' --model bad"), "bad");
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("program: --plan prints COAT's memory for Llama-2-7B and allocates nothing of it") {
    Folder folder;
    // 7B weights alone are 13 GB: an address space of one is not enough for any of the run. Sanitizers need more than all.
    const std::string limit = std::getenv("UBSAN_OPTIONS") ? "" : "ulimit -v 1000000; ";
    const Ended ended = shell(folder, limit + "'" + program() + "' --plan --model llama-2-7b --batch 8 --seq 2048");
    CHECK(ended.code == 0);
    CHECK(number_after(ended.out, "saved activations: ") <= 16.5);
    CHECK(number_after(ended.out, "saved activations: ") >= 16.0);
    CHECK(number_after(ended.out, "optimizer states: ") <= 2.2);
    CHECK(number_after(ended.out, "optimizer states: ") >= 2.0);
    CHECK(ended.out.find("C bytes per token and layer") != std::string::npos);
    CHECK(ended.out.find("bytes per parameter") != std::string::npos);
    for (const ModelConfig& c : models())
        for (const Recipe& r : recipes()) CHECK(train(folder, "--plan --batch 1 --seq 128 --model " + c.name + " --recipe " + r.name).code == 0);
    CHECK(folder.files().size() == 1);  // only the text
}

TEST_CASE("program: --steps 0 evaluates and writes nothing") {
    Folder folder;
    const Ended ended = tiny(folder, "--steps 0");
    CHECK(ended.code == 0);
    CHECK(number_after(ended.out, "validation | step 0 | loss ") == doctest::Approx(std::log(256.0)).epsilon(0.05));  // knows nothing yet
    CHECK(folder.files().size() == 1);
}

TEST_CASE("program: a run tells each step, validates, samples, saves and logs, in lines that can be parsed") {
    Folder folder;
    const Ended ended = train(folder, "--device cpu --data text --batch 4 --seq 32 --steps 12 --warmup 2 --lr 1e-2 --eval-every 5 --sample-every 6 "
                                      "--prompt 'int ' --log log");
    CHECK(ended.error.empty());
    REQUIRE(ended.code == 0);
    int steps = 0;
    std::istringstream lines(ended.out);
    for (std::string line; std::getline(lines, line);) {
        int step, of;
        double loss, norm, lr, ms, rate;
        steps += std::sscanf(line.c_str(), "step %d/%d | loss %lf | norm %lf | lr %lf | %lf ms | %lf tok/s", &step, &of, &loss, &norm, &lr, &ms,
                             &rate) == 7;
    }
    CHECK(steps == 12);
    CHECK(ended.out.find("sample | step 6 | ") != std::string::npos);
    CHECK(ended.out.find(" ms a token\n----------\nint ") != std::string::npos);
    CHECK(ended.out.find("expansion factor k") != std::string::npos);
    CHECK(fs::exists(folder.path / "out" / "step-000012" / "model.safetensors"));

    std::map<std::string, int> kinds;
    std::istringstream log(read_file(folder.path / "log"));
    nlohmann::json last;
    for (std::string line; std::getline(log, line);) {
        last = nlohmann::json::parse(line);
        const std::string kind = last.at("kind");
        if (kind == "step") CHECK(last.at("step") == kinds[kind] + 1);
        for (const char* field : {"loss", "grad_norm", "lr", "ms", "tokens_per_second"})
            if (kind == "step") CHECK(last.at(field).is_number());
        kinds[kind]++;
    }
    CHECK(kinds == std::map<std::string, int>{{"settings", 1}, {"step", 12}, {"validation", 4}, {"end", 1}});
    CHECK(last.at("kind") == "end");
    CHECK(last.at("validation").get<double>() < last.at("first_validation").get<double>() - 0.5);  // it learnt
}

TEST_CASE("program: the same seed gives the same bits, another seed does not") {
    Folder folder;
    require_success(tiny(folder, "--steps 4 --out a"));
    require_success(shell(folder, "OMP_NUM_THREADS=3 '" + program() + "'" + TINY + "--steps 4 --out b"));  // whatever the number of threads
    require_success(tiny(folder, "--steps 4 --out c --seed 2"));
    CHECK(weights_and_state(folder.path / "a/step-000004") == weights_and_state(folder.path / "b/step-000004"));
    CHECK(weights_and_state(folder.path / "a/step-000004") != weights_and_state(folder.path / "c/step-000004"));
}

TEST_CASE("program: stopping by a signal saves, and going on gives the bits of a run that was not stopped") {
    Folder folder;
    for (const auto& [formats, signal, code] : {std::tuple{std::string("--recipe coat"), "INT", 130}, {"--recipe bf16 --optimizer fp8", "TERM", 143},
                                                {"--recipe fp32", "HUP", 129}, {"--attention groups --master none --gradients none", "INT", 130}}) {
        CAPTURE(formats);
        fs::remove_all(folder.path / "whole");
        fs::remove_all(folder.path / "parts");
        const std::string flags = formats + " --steps 24 --eval-every 9 --warmup 4 ";
        require_success(tiny(folder, flags + "--out whole"));
        const Ended stopped = shell(folder, "mkfifo pipe; '" + program() + "'" + TINY + flags + "--out parts --log log > pipe & pid=$!\n"
                                            "while read -r line; do echo \"$line\"; case $line in 'step  2/'*) kill -" + signal + " $pid;; esac; done < pipe\n"
                                            "rm pipe; wait $pid");
        CHECK(stopped.code == code);
        CHECK(stopped.out.find("--resume parts") != std::string::npos);
        REQUIRE_MESSAGE(!fs::exists(folder.path / "parts/step-000024"), "the run ended before it was stopped");
        require_success(train(folder, "--device cpu --resume parts --log log"));
        CHECK(weights_and_state(folder.path / "whole/step-000024") == weights_and_state(folder.path / "parts/step-000024"));

        std::istringstream log(read_file(folder.path / "log"));  // has every step once
        int steps = 0;
        for (std::string line; std::getline(log, line);) steps += nlohmann::json::parse(line).at("kind") == "step";
        CHECK(steps == 24);
        fs::remove(folder.path / "log");
    }
}

TEST_CASE("program: under nohup a hangup stops nothing") {
    Folder folder;
    const Ended ended = shell(folder, "trap '' HUP; '" + program() + "'" + TINY + "--steps 24 --out '' > told & pid=$!\n"
                                      "until grep -q 'step  2/' told; do sleep 0.02; done; kill -HUP $pid; wait $pid");
    CHECK(ended.code == 0);
    CHECK(read_file(folder.path / "told").find("Done: 24 steps") != std::string::npos);
}

TEST_CASE("program: a finished run goes on when --steps grows") {
    Folder folder;
    require_success(tiny(folder, "--schedule constant --steps 6 --out whole"));
    require_success(tiny(folder, "--schedule constant --steps 3 --out parts"));
    require_success(train(folder, "--device cpu --resume parts --steps 6"));
    CHECK(weights_and_state(folder.path / "whole/step-000006") == weights_and_state(folder.path / "parts/step-000006"));
    CHECK(!fs::exists(folder.path / "parts/step-000003"));
}

TEST_CASE("program: outputs kept or computed again, a run has the same bits, and may go on either way") {
    Folder folder;
    require_success(tiny(folder, "--schedule constant --steps 6 --out on"));
    require_success(tiny(folder, "--schedule constant --steps 3 --recompute off --out off"));
    require_success(train(folder, "--device cpu --resume off --steps 5"));
    require_success(train(folder, "--device cpu --resume off --steps 6 --recompute on"));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        CHECK(read_file(folder.path / "on/step-000006" / file) == read_file(folder.path / "off/step-000006" / file));
}

TEST_CASE("program: without kept gradients a checkpoint says how the last norm grew; and without a master it is smaller") {
    Folder folder;
    require_success(tiny(folder, "--steps 3 --gradients none --master none --out lean"));
    require_success(tiny(folder, "--steps 3 --out usual"));
    const auto growth = [&](const char* run) {
        return nlohmann::json::parse(read_file(folder.path / run / "step-000003/trainer.json")).at("growth").get<std::vector<double>>();
    };
    ModelConfig config = find_row(models(), "llama-tiny", "");
    config.V = 256;
    const std::vector<double> lean = growth("lean");
    REQUIRE(int64_t(lean.size()) == parameters(config).back().unit + 1);
    CHECK(lean[0] == 1);
    CHECK(std::is_sorted(lean.begin(), lean.end()));  // the norm of fewer units is smaller
    CHECK(lean.back() > 2);
    CHECK(growth("usual").empty());
    const auto size = [&](const char* run) { return int64_t(fs::file_size(folder.path / run / "step-000003/optimizer.safetensors")); };
    CHECK(size("usual") - size("lean") > 2 * parameter_count(config));
}

TEST_CASE("program: without kept gradients the first step is clipped by its own norm") {
    Folder folder;
    require_success(tiny(folder, "--steps 1 --warmup 0 --gradients none --out spent"));
    require_success(tiny(folder, "--steps 1 --warmup 0 --out kept"));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
        std::string spent = read_file(folder.path / "spent/step-000001" / file);
        const size_t mode = spent.find("\"gradients\":\"none\"");  // the moments' file says which run it is of
        if (mode != std::string::npos) spent.replace(mode, 18, "\"gradients\":\"kept\"");
        CHECK((spent == read_file(folder.path / "kept/step-000001" / file)));
    }
}

TEST_CASE("program: without kept gradients a first step that is not finite is still clipped in what it updates") {
    // Layer 1's gates are 0, so that its huge weights add nothing forward; backward, the gradient of a gate is infinite.
    Setup setup{find_row(models(), "llama-tiny", ""), find_row(recipes(), "fp32", ""), find_row(optimizers(), "fp32", ""), 2, 16};
    setup.config.V = 256, setup.keep_gradients = false;
    const std::unique_ptr<Model> model = make_reference(setup);
    const int64_t half = setup.config.F * setup.config.C;
    std::vector<uint16_t> up(2 * half, 0), down(half, 0x7B80);  // 2^120
    std::fill(up.begin() + half, up.end(), 0x7180);             // 2^100
    std::fill(down.begin(), down.begin() + half / 2, 0xFB00);   // -2^119: else the sum over a row of the gradient might cancel
    model->write("layers.1.up", up.data());
    model->write("layers.1.down", down.data());
    Folder folder;
    const std::string start = save_checkpoint((folder.path / "start").string(), *model, {});
    const Ended ended = tiny(folder, "--steps 1 --warmup 0 --recipe fp32 --gradients none --clip 1e-3 --model '" + start + "'");
    require_success(ended);
    CHECK(ended.out.find("1 skipped") != std::string::npos);
    const std::string checkpoint = (folder.path / "out/step-000001").string();
    CHECK(read_loop_state(checkpoint).growth.empty());
    load_checkpoint(checkpoint, *model);
    double squares = 0;
    for (const Param& p : parameters(setup.config)) {
        std::vector<float> m(static_cast<size_t>(p.size()));
        model->read(p.name + ".m", m.data());
        double own = 0;
        for (float x : m) own += double(x) * x;
        INFO(p.name);
        CHECK(std::sqrt(own) <= 0.1 * 1e-3 * (1 + 1e-5));  // (1 - beta1) times the gradient, clipped by a norm that is at least its own
        squares += own;
    }
    CHECK(squares > 0);
}

TEST_CASE("program: a saved model is a folder that another run starts from") {
    Folder folder;
    require_success(tiny(folder, "--steps 8 --lr 1e-2 --warmup 1"));
    const double trained = number_after(tiny(folder, "--steps 0 --model out/step-000008").out, "validation | step 0 | loss ");
    const double resumed = number_after(train(folder, "--device cpu --resume out --steps 0").out, "validation | step 8 | loss ");
    CHECK(trained < std::log(256.0) - 0.5);
    // The folder's weights are BF16, the run's master is FP32: in the coat recipe GEMMs read BF16 weights, so the loss is the same.
    CHECK(trained == resumed);
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("plan: the learning rate warms up, decays to a tenth, and never leaves its bounds") {
    const double peak = 3e-3;
    for (const Schedule& s : schedules()) {
        CAPTURE(s.name);
        CHECK(learning_rate(s, peak, 20, 300, 0) == static_cast<float>(peak / 20));
        CHECK(learning_rate(s, peak, 20, 300, 19) == static_cast<float>(peak));
        CHECK(learning_rate(s, peak, 20, 300, 20) == static_cast<float>(peak));
        const double end = std::string(s.name) == "constant" ? peak : peak / 10;
        CHECK(learning_rate(s, peak, 20, 300, 300) == doctest::Approx(end));
        for (int64_t step = 21; step < 400; step++) {
            CHECK(learning_rate(s, peak, 20, 300, step) <= learning_rate(s, peak, 20, 300, step - 1));
            CHECK(learning_rate(s, peak, 20, 300, step) >= static_cast<float>(end * (1 - 1e-6)));
        }
        CHECK(learning_rate(s, peak, 0, 1, 0) == static_cast<float>(peak));
        CHECK(learning_rate(s, peak, 500, 300, 299) == static_cast<float>(peak * 300 / 500));  // a warm-up that does not end
    }
    CHECK(learning_rate(find_row(schedules(), "cosine", ""), peak, 0, 100, 50) == doctest::Approx(peak * 0.55));
    CHECK(learning_rate(find_row(schedules(), "linear", ""), peak, 0, 100, 50) == doctest::Approx(peak * 0.55));
}

TEST_CASE("plan: the memory plan holds exactly the state that the vocabulary names, padded to groups") {
    for (const ModelConfig& model : models())
        for (const Recipe& recipe : recipes())
            for (const OptimizerFormat& optimizer : optimizers()) {
                CAPTURE(model.name);
                CAPTURE(recipe.name);
                CAPTURE(optimizer.name);
                Setup s{model, recipe, optimizer, 3, 48};
                if (s.config.V == 0) s.config.V = 256;
                const std::vector<MemoryRow> plan = memory_plan(s);
                const auto params = parameters(s.config);
                int64_t state = 0, weights = 0;  // remainders and delayed scales are the weights' part
                for (const StateTensor& t : optimizer_tensors(s))
                    if (t.name.find(".remainder") == std::string::npos) state += t.total_bytes();
                for (const StateTensor& t : scaling_tensors(s.config, s.recipe)) state -= t.total_bytes(), weights += t.total_bytes();
                for (const StateTensor& t : weight_tensors(s.config)) weights += t.size() * 4;  // FP32, or BF16 and two remainders
                const int64_t padding = static_cast<int64_t>(params.size()) * (MOMENT_GROUP - 1) * 8;
                CHECK(total_bytes(plan, Category::Optimizer) >= state);
                CHECK(total_bytes(plan, Category::Optimizer) <= state + padding);
                CHECK(total_bytes(plan, Category::Weights) >= weights);
                CHECK(total_bytes(plan, Category::Weights) <= weights + padding);
                const int64_t final_input = 3 * 48 * s.config.C * info(recipe.stream).bytes;
                CHECK(total_bytes(plan, Category::Activations) ==
                      std::llround(saved_bytes_per_token_and_layer(s) * 3 * 48) * s.config.L + final_input);
            }
}

TEST_CASE("plan: moments that no kernel holds are refused for the GPU, with the cure, and the others are not") {
    for (const OptimizerFormat& optimizer : optimizers()) CHECK(why_not(optimizer).empty());
    OptimizerFormat mixed = find_row(optimizers(), "coat", "");
    mixed.v = Format::F16;
    CHECK(why_not(mixed) == "--v-format fp16 in groups of 128 is told by the CPU reference alone; use --optimizer fp8lm, or --device cpu.");
    OptimizerFormat whole = find_row(optimizers(), "fp8lm", "");
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3, Format::E5M2}) {
        whole.m = whole.v = f;
        CHECK(why_not(whole).empty());
    }
    whole.expand = true;
    CHECK(why_not(whole).find("--optimizer fp8lm expands") == 0);
    OptimizerFormat flushing = find_row(optimizers(), "fp8", "");
    flushing.keep_positive = false;
    CHECK(why_not(flushing).find("--optimizer fp8 lets least numbers") == 0);
}

TEST_CASE("plan: scales that a GPU's products do not know are refused there, with the cure; Hopper's know all, and one without FP8 products wants none") {
    for (const Recipe& r : recipes()) {
        const std::string name = r.name;
        CHECK(why_not(r).empty());
        for (int capability : {89, 100, 120}) CHECK(why_not(r, capability).empty() == (name != "rowwise" && name != "deepseek"));
        CHECK(why_not(recipe_on_gpu(r, false), 80).empty());
    }
    Recipe squares = find_row(recipes(), "coat", "");
    squares.nonlinear = {Format::E4M3, {4, 4}};
    CHECK(why_not(squares, 90) == "--recipe coat keeps e4m3 4x4 beside bf16 for backward, which the CPU reference alone does; keep e4m3 1x16 beside bf16, or use "
                                    "--device cpu.");
    Recipe groups = find_row(recipes(), "fp32", "");
    groups.nonlinear = Q_GROUP;
    CHECK(why_not(groups, 90).find("--recipe fp32 keeps e4m3 1x16 beside fp32") == 0);
    CHECK(why_not(find_row(recipes(), "rowwise", ""), 89) ==
          "--recipe rowwise multiplies e4m3 row, which GPUs of compute capability 9.0 alone do, and this one has 8.9; use --recipe colossal, or --device cpu.");
}

TEST_CASE("plan: heads x head size is bounded, not only each of them") {
    ModelConfig c = find_row(models(), "gpt2", "");
    c.NH = c.NKV = 1 << 12, c.head_size = 256;
    CHECK_NOTHROW(validate(c));
    c.NH = c.NKV = 1 << 15;  // a GPU's grid has too few blocks for so many rows of a weight
    CHECK_THROWS_AS(validate(c), Error);
}

TEST_CASE("plan: a recipe whose products Hopper cannot do is refused in one sentence with the cure") {
    auto why = [](const Recipe& r) -> std::string {
        Setup s{find_row(models(), "gpt2", ""), r, find_row(optimizers(), "fp32", ""), 1, 128};
        try {
            validate(s);
        } catch (const Error& e) {
            return e.what();
        }
        return "";
    };
    auto row = [](const char* name) { return find_row(recipes(), name, ""); };
    for (const Recipe& r : recipes()) CHECK(why(r) == "");
    const Quant e5m2_vector{Format::E5M2, PER_VECTOR};
    std::vector<std::pair<Recipe, std::string>> refused;
    auto change = [&](const char* name, const std::string& reason, auto what) {
        refused.push_back({row(name), reason});
        what(refused.back().first);
    };
    change("deepseek", "fprop multiply e4m3 128x128 by e4m3 128x128", [](Recipe& r) { r.x = Q_BLOCK; });
    change("deepseek", "dgrad multiply e4m3 128x128 by e4m3 128x128", [](Recipe& r) { r.g = Q_BLOCK; });
    change("deepseek", "two E5M2", [&](Recipe& r) { r.x = r.g = e5m2_vector; });
    change("colossal", "two E5M2", [](Recipe& r) { r.w = Q_E5M2; });
    for (int product = 0; product < 3; product++)
        change("deepseek", "--accumulation exact", [&](Recipe& r) { r.fast_accumulation[product] = true; });
    change("rowwise", "delayed scaling knows one scale a tensor", [](Recipe& r) { r.scaling = Scaling::Delayed; });
    change("rowwise", "row by row", [](Recipe& r) { r.w = Q_E4M3; });
    change("colossal", "fprop multiply e4m3 tensor by e4m3 1x16", [](Recipe& r) { r.w = {Format::E4M3, PER_GROUP}; });
    change("colossal", "FP32 scales", [](Recipe& r) { r.x.scale = Format::BF16; });
    change("colossal", "both operands must be FP8", [](Recipe& r) { r.g = Q_BF16; });
    change("te", "give it 1 step or more", [](Recipe& r) { r.history = 0; });
    for (const auto& [recipe, reason] : refused) {
        const std::string sentence = why(recipe);
        CAPTURE(reason);
        CAPTURE(sentence);
        CHECK(sentence.find(reason) != std::string::npos);
        CHECK(sentence.find(std::string("Recipe ") + recipe.name) == 0);
        CHECK((!sentence.empty() && sentence.back() == '.'));
    }
    Recipe e5m2 = row("deepseek");  // what the table does not have but a GPU can do
    e5m2.g = e5m2_vector;
    CHECK(why(e5m2) == "");
}

TEST_CASE("plan: what a delayed recipe keeps between steps, and that linear layers in FP8 alone save nothing of activations") {
    Setup te{find_row(models(), "llama-2-7b", ""), find_row(recipes(), "te", ""), find_row(optimizers(), "fp32", ""), 8, 2048};
    int64_t bytes = 0;
    for (const StateTensor& t : scaling_tensors(te.config, te.recipe)) bytes += t.total_bytes();
    CHECK(bytes == 32 * 4 * 3 * (1024 + 1) * 4);
    CHECK(total_bytes(memory_plan(te), Category::Weights) - total_bytes(memory_plan(bf16_beside(te)), Category::Weights) == bytes);
    for (const char* recipe : {"te", "colossal", "rowwise", "deepseek"}) {
        te.recipe = find_row(recipes(), recipe, "");
        CHECK(saved_bytes_per_token_and_layer(te) == saved_bytes_per_token_and_layer(bf16_beside(te)));
    }
}

TEST_CASE("plan: every memory mode changes its own rows alone, by what it says") {
    for (const ModelConfig& model : models())
        for (const char* recipe : {"bf16", "coat"}) {
            CAPTURE(model.name);
            CAPTURE(recipe);
            Setup s{model, find_row(recipes(), recipe, ""), find_row(optimizers(), "coat", ""), 3, 48};
            if (s.config.V == 0) s.config.V = 256;
            const ModelConfig& c = s.config;
            const std::vector<MemoryRow> usual = memory_plan(s);
            const std::vector<Param> params = parameters(c);
            std::map<int64_t, int64_t> units;
            for (const Param& p : params) units[p.unit] += p.padded_size();
            int64_t elements = 0, largest = 0;
            for (const auto& [unit, size] : units) {
                elements += size;
                if (unit > 0 || !c.tied) largest = std::max(largest, size);
            }
            if (c.tied) largest += units.at(0);  // that of the embedding is added to from the head on
            const Quant wide = s.recipe.attention, x = linear_quant(s).x;
            const int64_t attention = (wide.bytes(48, c.qkv_cols() + c.q_cols()) - Q_GROUP.bytes(48, c.qkv_cols() + c.q_cols())) * 3 * c.L;
            const std::map<std::string, std::pair<Category, int64_t>> freed = {
                {"attention", {Category::Activations, attention}},
                {"master", {Category::Weights, 2 * elements}},
                {"gradients", {Category::Gradients, 2 * (elements - largest)}},
                {"recompute", {Category::Activations, -(2 * x.bytes(3 * 48, c.C) + x.bytes(3 * 48, c.F)) * c.L}}};
            for (const MemoryMode& mode : memory_modes()) {
                CAPTURE(mode.flag);
                Setup other = s;
                mode.choose(other, false);
                CHECK(!mode.is_first(other));
                const std::vector<MemoryRow> plan = memory_plan(other);
                const auto& [category, bytes] = freed.at(mode.flag);
                CHECK(total_bytes(usual, category) - total_bytes(plan, category) == bytes);
                CHECK(total_bytes(usual) - total_bytes(plan) == bytes);
                CHECK(total_bytes(memory_plan(bf16_beside(other))) == total_bytes(memory_plan(bf16_beside(s))));  // what it is printed beside stays
                mode.choose(other, true);
                CHECK(mode.is_first(other));
                CHECK(total_bytes(memory_plan(other)) == total_bytes(usual));
            }
        }
}

TEST_CASE("plan: why a machine's GPU cannot be used, and the cure, by what CUDA says of it") {
    const GpuFound good{13000, 13000, false, "", 1, 90, true};
    CHECK(why_not(good).empty());
    auto said = [&](auto change) {
        GpuFound found = good;
        change(found);
        return why_not(found);
    };
    const std::pair<std::string, const char*> cases[] = {
        {said([](GpuFound& f) { f.driver = 0; }), "no NVIDIA driver was found: install one"},
        {said([](GpuFound& f) { f.driver = 12040, f.driver_too_old = true; }), "knows CUDA 12.4 and this program needs 13.0: update the driver"},
        {said([](GpuFound& f) { f.error = "unknown error"; }), "CUDA does not start (unknown error): check nvidia-smi"},
        {said([](GpuFound& f) { f.gpus = 0; }), "no NVIDIA GPU was found: check"},
        {said([](GpuFound& f) { f.capability = 75; }), "compute capability 7.5, and BF16 begins with 8.0: use a newer one, or --device cpu"},
        {said([](GpuFound& f) { f.capability = 100, f.kernels_fit = false; }), "compute capability 10.0: run make clean, then make GPU_ARCH=100a"},
        {said([](GpuFound& f) { f.capability = 86, f.kernels_fit = false; }), "make GPU_ARCH=86"},
    };
    for (const auto& [sentence, wanted] : cases) {
        INFO(sentence);
        CHECK(sentence.find(wanted) != std::string::npos);
    }
    CHECK(why_not({12040, 13000, true, "", 0, 0, false}).find("update the driver") != std::string::npos);  // what an old driver really says
}

TEST_CASE("plan: the precision plan says of every memory mode what it changes") {
    auto told = [](const std::string& flag, const std::string& part) {
        Setup s{find_row(models(), "llama-2-7b", ""), find_row(recipes(), "coat", ""), find_row(optimizers(), "coat", ""), 1, 64};
        int rows = 0;
        for (const MemoryMode& mode : memory_modes())
            if (flag == mode.flag) mode.choose(s, false);
        for (const PrecisionRow& r : precision_plan(s))
            rows += (r.name + "|" + r.input + "|" + r.output + "|" + r.saved).find(part) != std::string::npos;
        return rows;
    };
    for (const auto& [flag, part, rows] : {std::tuple{"attention", "e4m3 1x16 q, k, v", 1}, {"attention", "rotary positions|bf16|e4m3 1x16", 1},
                                           {"master", "bf16 stochastically", 1}, {"recompute", "; e4m3 tensor output", 3}}) {
        CAPTURE(part);
        CHECK(told("", part) == 0);
        CHECK(told(flag, part) == rows);
    }
    CHECK(told("", "bf16 and 16 bits: fp32|bf16 and 16 bits: fp32") == 1);
    Folder folder;
    CHECK(train(folder, "--plan --gradients none").out.find("--clip goes by") != std::string::npos);
    CHECK(train(folder, "--plan").out.find("--clip goes by") == std::string::npos);
}

TEST_CASE("plan: a linear layer that cannot run in FP8 is said to fall back") {
    auto falls_back = [](int64_t T) {
        Setup s{find_row(models(), "llama-2-7b", ""), find_row(recipes(), "coat", ""), find_row(optimizers(), "coat", ""), 1, T};
        int rows = 0;
        for (const PrecisionRow& row : precision_plan(s)) {
            const bool said = row.name.find("falls back") != std::string::npos;
            if (said) CHECK(row.input.find("e4m3") == std::string::npos);
            rows += said;
        }
        return rows;
    };
    CHECK(falls_back(64) == 0);
    CHECK(falls_back(65) == 6);  // four linear layers, and the two GEMMs of their backward
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("walk: what dev/WALK.md quotes of a file stands there, line by line and in that order") {
    auto trimmed = [](const std::string& line) {
        const size_t first = line.find_first_not_of(' ');
        return first == std::string::npos ? "" : line.substr(first);
    };
    std::istringstream walk(read_file("dev/WALK.md"));
    std::istringstream source;
    std::string file, line, found;
    bool gap = false;  // lines were left out before this one
    int quoted = 0;
    while (std::getline(walk, line)) {
        const bool fence = line.rfind("```", 0) == 0;
        if (fence) file = line.rfind("```cpp ", 0) == 0 ? line.substr(7) : "";
        if (fence && !file.empty()) source = std::istringstream(read_file(file));
        if (fence || trimmed(line) == "// ...") gap = true;
        else if (!file.empty() && !trimmed(line).empty()) {
            CAPTURE(file);
            CAPTURE(line);
            bool stands = false, over = false;
            while (!stands && !over && std::getline(source, found)) {
                stands = trimmed(found) == trimmed(line);
                over = !gap && !trimmed(found).empty();
            }
            CHECK(stands);
            gap = false;
            quoted++;
        }
    }
    CHECK(quoted > 40);
}
