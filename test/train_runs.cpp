// train_runs.cpp - what runs of ./train print, log and save; after a stop they go on with the same bits.
#include <cmath>
#include <set>

#include "../program/plan.h"
#include "../program/report.h"
#include "../program/train_step.h"
#include "../reference/operators.h"
#include "../reference/optimizer.h"
#include "help/program.h"

using namespace coat;
using namespace coat::test;

// Two checkpoints have the same tensors, and the same state but for flags such as --steps.
static void check_same(const Folder& folder, const std::string& a, const std::string& b) {
    INFO(a, " and ", b);
    CHECK((tensors_of(folder.path / a) == tensors_of(folder.path / b)));
    auto state = [&](const std::string& checkpoint) {
        auto json = nlohmann::json::parse(read_file(folder.path / checkpoint / "trainer.json"));
        json.erase("hash");
        json.erase("settings");
        return json;
    };
    CHECK(state(a) == state(b));
}

// The model that the small folder has, on the CPU in FP32, to compute what ./train should print.
static std::unique_ptr<Model> small_reference(int64_t B, int64_t T, int64_t accumulate = 1) {
    std::unique_ptr<Model> model =
        make_reference_model(settings_of("fp32", small_config(), B, T, accumulate));
    load_weights(small_model(), *model);
    return model;
}

// Lines of steps and validations, up to the learning rate.
static std::string numbers_in(const std::string& output) {
    std::string found;
    for (const std::string& line : lines_of(output))
        if (line.rfind("step ", 0) == 0 || line.rfind("validation | ", 0) == 0)
            found += line.substr(0, line.find(" | lr")) + "\n";
    return found;
}

TEST_CASE("train: a run prints steps and validates and samples and saves and logs") {
    RunFolder folder;
    const Ended ended = tiny(folder,
                             "--batch 4 --seq 32 --steps 12 --warmup 2 --lr 1e-2 --eval-every 5 "
                             "--sample-every 6 --log log");
    require_success(ended);
    CHECK(ended.error.empty());
    const std::string before = ended.out.substr(0, ended.out.find("validation | step 0"));
    CHECK(std::count(before.begin(), before.end(), '\n') <= 13);
    for (const char* part :
         {"weights of ", "batch: 128 tokens", "\nsteps: 12, with 1,536 tokens: 0.03 epochs of",
          "sample | step 6\n", "exponent k of second moments", "Validation loss 5.",
          "saved | step 12 | out/step-000012"})
        CHECK(contains(ended.out, part));
    const auto log = logged(folder, "step"), end = logged(folder, "end");
    double seconds = 0;
    for (size_t i = 0; i < log.size(); i++) {
        CHECK(log[i].at("step") == i + 1);
        const double took = log[i].at("ms").get<double>() / 1e3;
        CHECK(log[i].at("tokens_per_second").get<double>() * took == doctest::Approx(4 * 32));
        if (i > 0) seconds += took;
    }
    // The first step warms caches, and does not count.
    CHECK(end[0].at("tokens_per_second").get<double>() == doctest::Approx(11 * 4 * 32 / seconds));
    CHECK(end[0].at("validation").get<double>() < end[0].at("first_validation").get<double>() - 0.5);
    CHECK(end[0].at("validation") == logged(folder, "validation").back().at("loss"));
    require_success(tiny(folder, "--steps 0 --out '' --log log"));  // appends
    for (const auto& [kind, n] :
         {std::pair{"settings", 2}, {"step", 12}, {"validation", 5}, {"sample", 2}, {"end", 1}})
        CHECK(logged(folder, kind).size() == size_t(n));
}

TEST_CASE("train: a step prints how long the rest of the run will take") {
    RunFolder folder;
    const Ended ended =
        run_with_action(folder, TINY + "--batch 32 --seq 128 --steps 1001 --eval-every 0 --out '' --log log",
                        "step    1/1001", "kill -INT $pid");
    const std::string line = ended.out.substr(ended.out.find("step    1/1001"));
    const size_t end = line.find(" left"), bar = line.rfind("| ", end);
    const double minutes = std::stod(line.substr(bar + 2));
    const double seconds = 60 * minutes + std::stod(line.substr(line.find('m', bar) + 1));
    // The first step alone is known then; what comes before it takes little time.
    const double all_as_first = logged(folder, "step").at(0).at("ms").get<double>();  // 1000 steps
    CHECK(seconds > 0.95 * all_as_first - 1);
    CHECK(seconds < 1.7 * all_as_first + 1);
}

TEST_CASE("train: --plan and --help and --steps 0 write nothing") {
    RunFolder folder;
    const Ended plan = train(folder, "--plan --ranks 8 --model llama-2-7b --batch 8 --seq 2048");
    require_success(plan);
    CHECK(number_after(plan.out, "saved activations: ") == doctest::Approx(16.33).epsilon(0.0006));
    // On a CPU nothing of a GPU is in the table. On a GPU it is, or the figure is said to be incomplete.
    const std::string cpu = train(folder, "--plan --device cpu --model llama-2-7b --batch 8 --seq 2048").out;
    const std::string gpu = train(folder, "--plan --device gpu --model llama-2-7b --batch 8 --seq 2048").out;
    CHECK(!contains(cpu, "CUDA"));
    CHECK(contains(gpu, "CUDA context"));
    CHECK(!contains(gpu, concat(GPU_CONTEXT)));  // a GB figure alone: it is not bytes of an item
    const bool complete = built_with_cuda();
    CHECK(contains(cpu, "total without working memory"));
    CHECK(contains(gpu, "total without working memory") == !complete);
    CHECK(contains(cpu, "\nNot in this table: the FP32 copies"));
    CHECK(!contains(gpu, "FP32 copies"));
    for (const std::string& out : {cpu, gpu}) {
        CHECK(contains(out, "\nOn a GPU: "));
        CHECK(contains(out, complete ? "Fits: " : "more than "));
        CHECK(contains(out, " a GB is 10^9 bytes"));
        CHECK(!contains(out, "MiB"));
    }
    const Ended help = train(folder, "--help");
    require_success(help);
    int flags = 0;
    for (const std::string& line : lines_of(help.out)) {
        CHECK(line.size() <= 100);
        flags += line.rfind("  --", 0) == 0;
    }
    CHECK(flags > 20);
    for (const char* words : {"one of: unquantized groups", "one of: exact none", "one of: kept none",
                              "--clip 0, --accumulate 1, one GPU", "that of tokenize.py", "(its eps is 1e-8)",
                              "The tokens of text are its bytes", "\nExamples\n"})
        CHECK(contains(help.out, words));
    const Ended ran = tiny(folder, "--steps 0");
    require_success(ran);
    CHECK(number_after(ran.out, "validation | step 0 | loss") == doctest::Approx(std::log(256)).epsilon(.05));
    CHECK(folder.files().size() == 1);  // only "text"
}

TEST_CASE("train: a value follows its flag or an equals sign; -h and --version print and stop") {
    RunFolder folder;
    const Ended spaces = tiny(folder, "--steps 2 --out a --eval-every 0 --recipe fp32");
    require_success(spaces);
    require_success(tiny(folder, "--steps=2 --out=b --eval-every=0 --recipe=fp32"));
    check_same(folder, "a/step-000002", "b/step-000002");
    const std::string out = tiny(folder, "--steps=1 --out= --data=text").out;  // an empty value
    CHECK((contains(out, "Done: 1 step ") && !contains(out, "saved | ")));
    const Ended help = train(folder, "--help");
    const Ended h = train(folder, "--steps 4 -h");
    CHECK(h.code == 0);
    CHECK(h.out == help.out);
    CHECK(contains(h.out, "--steps=9"));
    const Ended version = train(folder, "--version");
    CHECK(version.code == 0);
    CHECK(version.error.empty());
    CHECK(contains(version.out, "COAT " + std::string(VERSION)));
    CHECK(contains(read_file("CITATION.cff"), concat("\nversion: ", VERSION, "\n")));
}

TEST_CASE("train: without --lr the rate follows from the weights; a run that goes on keeps its own") {
    RunFolder folder;
    const std::string flags =
        "--device cpu --data text --batch 1 --seq 16 --sample-every 0 --eval-tokens 640 --warmup 0 --log "
        "log ";
    const std::string of_folder = "1e-05, the default of weights from a folder; 0 steps of warm-up\n",
                      of_size = "0.003, the default of 771,200 new weights; 0 steps of warm-up\n";
    for (const auto& [more, lr, says] :
         {std::tuple{"--out a --model \"$SMALL\"", 1e-5, of_folder},
          {"--out b --model \"$SMALL\" --lr 2e-3", 2e-3, "0.002; 0 steps of warm-up\n"},
          {"--out c --model llama-tiny", 3e-3, of_size}}) {
        const Ended ended = train(folder, flags + "--steps 1 " + more);
        require_success(ended);
        CHECK(contains(ended.out, "\nlearning rate: " + says));
        CHECK(logged(folder, "step").back().at("lr") == double(float(lr)));
    }
    for (const auto& [out, lr, says] : {std::tuple{"a", 1e-5, "1e-05;"}, {"c", 3e-3, "0.003;"}}) {
        const Ended resumed = train(folder, concat("--device cpu --steps 2 --log log --resume ", out));
        require_success(resumed);
        CHECK(contains(resumed.out, concat("\nlearning rate: ", says)));
        CHECK(logged(folder, "step").back().at("lr") == double(learning_rate(lr, 0, 2, 1)));
    }
    const std::string plan = "--plan --device gpu --batch 1 --seq 128 --model ";
    CHECK(
        contains(train(folder, plan + "llama-2-7b").out, "\nlearning rate: 0.00012, the default of 6,738,"));
    CHECK(contains(train(folder, plan + "gpt2").out, "\nlearning rate: 0.0006, the default of 124,439,808"));
    CHECK(!contains(tiny(folder, "--steps 0").out, "learning rate: "));
    const std::string help = train(folder, "--help").out;
    CHECK(contains(help, "\n  --lr           by size, see below "));
    CHECK(contains(help, "\n  --warmup       100; less if short "));
    CHECK(contains(help, "Weights from a folder have the default 1e-05,"));
    CHECK(contains(help, "\n  up to 10 million     0.003\n"));
    CHECK(contains(help, "\n  more                 0.0001\n"));
}

TEST_CASE("train: without --warmup a short run warms up for a tenth of its steps; --resume keeps that") {
    RunFolder folder;
    const std::string flags = "--device cpu --log log --eval-every 0 ";
    auto rate = [&](size_t step) { return logged(folder, "step").at(step - 1).at("lr").get<double>(); };
    const Ended ended = tiny(folder, flags + "--steps 120 --save-every 20 --keep 9");
    require_success(ended);
    CHECK(contains(ended.out, "\nlearning rate: 0.003; 12 steps of warm-up\n"));
    CHECK(rate(1) == double(float(3e-3 / 12)));
    CHECK(rate(12) == double(float(3e-3)));
    CHECK(rate(14) < rate(13));
    // A run that is made longer does not warm up again.
    const Ended longer = train(folder, "--device cpu --plan --resume out/step-000020 --steps 400");
    CHECK(contains(longer.out, "; 12 steps of warm-up\n"));
    const std::string plan = "--plan --device cpu ";
    for (const auto& [of_run, warmup] : {std::pair{"--steps 250", 100}, {"--steps 249", 24}, {"", 100}})
        CHECK(contains(train(folder, plan + of_run).out, concat("; ", warmup, " steps of warm-up\n")));
}

TEST_CASE("train: a warm-up longer than the run is shortened so that the rate reaches --lr and it is said") {
    RunFolder folder;
    const Ended ended = tiny(folder, "--steps 20 --warmup 100 --eval-every 0 --out '' --log log");
    require_success(ended);
    CHECK(
        contains(ended.out,
                 "; 2 steps of warm-up, a tenth of the run, since --warmup 100 is longer than --steps 20\n"));
    double most = 0;
    for (const auto& line : logged(folder, "step")) most = std::max(most, line.at("lr").get<double>());
    CHECK(most == double(float(3e-3)));
    CHECK(contains(tiny(folder, "--steps 2 --warmup 1 --out ''").out,
                   "\nlearning rate: 0.003; 1 step of warm-up\n"));
}

TEST_CASE("train: a run says only what is so: no empty line or table and singular and all ranks' rates") {
    RunFolder folder;
    const Ended fp32 = tiny(folder, "--recipe fp32 --steps 2 --out '' --log log");
    require_success(fp32);
    CHECK(!contains(fp32.out, "Quantization"));  // FP32 quantizes nothing
    CHECK(contains(fp32.out, "checkpoints: none are saved\n"));
    CHECK(contains(fp32.out, "batch: 32 tokens, 1 micro-batch of 2 x 16\n"));
    const Ended evaluated = tiny(folder, "--recipe coat --steps 0");
    require_success(evaluated);
    CHECK(contains(evaluated.out, "Quantization"));
    CHECK(!contains(evaluated.out, "moments  "));  // of an update that never happens
    CHECK(!contains(evaluated.out, "expansion exponent"));
    const Ended two = tiny(folder, "--recipe fp32 --steps 2 --out '' --log log --ranks 2 --accumulate 2");
    require_success(two);
    const Ended one = tiny(folder, "--recipe fp32 --steps 1 --out ''");
    CHECK(contains(one.out, "Done: 1 step in "));
    CHECK(!contains(one.out, "without validation"));
    CHECK(contains(fp32.out, "Done: 2 steps in "));
    CHECK(contains(fp32.out, "\nStep 2 took "));
    CHECK(contains(two.out, "batch: 128 tokens, 4 micro-batches of 2 x 16 on 2 ranks\n"));
    const double flops = flops_per_token(small_config(), 16);
    for (const auto& line : logged(folder, "step"))
        CHECK(line.at("tflops").get<double>() ==
              doctest::Approx(line.at("tokens_per_second").get<double>() * flops * 1e-12));
}

TEST_CASE("train: every flag that changes numbers changes the weights; threads and the rest do not") {
    RunFolder folder;
    auto weights = [&](const std::string& flags, const std::string& environment = "") {
        fs::remove_all(folder.path / "out");
        require_success(
            shell(folder, environment + "train" + TINY + "--seq 24 --warmup 1 --lr 1e-2 --steps 3 " + flags));
        return read_file(folder.path / "out/step-000003/model.safetensors");
    };
    const std::string standard = weights("");
    CHECK((weights("--seed 1 --eval-every 1 --save-every 1 --sample-every 1 --log log",
                   "OMP_NUM_THREADS=3 ") == standard));
    for (const char* flags :
         {"--model llama-tiny", "--recipe fp32", "--optimizer fp8", "--attention groups", "--master none",
          "--batch 1", "--seq 32", "--accumulate 2", "--lr 2e-2", "--warmup 3", "--beta1 0.8", "--beta2 0.9",
          "--weight-decay 10", "--clip 0.1", "--seed 2"}) {
        CAPTURE(flags);
        CHECK((weights(flags) != standard));
    }
    // Without clipping, whether gradients are kept changes no bits.
    CHECK((weights("--clip 0") == weights("--clip 0 --gradients none")));
}

// Each run is made whole, and in two parts: the first is stopped, and `then` may change the number of ranks.
TEST_CASE("train: stopped anywhere on any number of ranks a run goes on with the same bits") {
    struct Row {
        const char *flags, *first, *stop, *then;
        int code;
    };
    for (const Row& row :
         {Row{"--recipe coat", "", "INT $pid; kill -INT", "", 130},
          {"--recipe bf16 --optimizer fp8", "", "TERM", "", 143},
          {"--recipe fp32", "", "HUP", "", 129},
          {"--recipe te --accumulate 2", "", "KILL", "", 137},
          {"--attention groups --master none --gradients none --clip 0", "", "INT", "", 130},
          {"--recipe fp32 --accumulate 4", "--ranks 4 --accumulate 1", "INT", "--ranks 2", 130},
          {"--recipe coat --accumulate 10", "--ranks 2 --accumulate 5", "KILL", "", 137}}) {
        INFO(std::string(row.flags), ", ", std::string(row.stop));
        RunFolder folder;
        const std::string flags =
            std::string("--batch 1 --warmup 4 --eval-every 9 --save-every 5 --steps 20 ") + row.flags;
        require_success(tiny(folder, flags + " --out whole"));
        const Ended stopped =
            run_with_action(folder, TINY + flags + " " + row.first + " --out parts --log log", "step  7/",
                            std::string("kill -") + row.stop + " $pid");
        CHECK(stopped.code == row.code);
        REQUIRE(!fs::exists(folder.path / "parts/step-000020"));
        CHECK(contains(stopped.out, "continue with --resume parts") == (row.code != 137));
        const Ended resumed = train(folder, std::string("--device cpu --resume parts --log log ") + row.then);
        require_success(resumed);
        CHECK(contains(resumed.out, "continuing step "));
        check_same(folder, "whole/step-000020", "parts/step-000020");
        if (row.code != 137) CHECK(logged(folder, "step").size() == 20);  // every step once
    }
}

TEST_CASE("train: what --resume changes of the steps to come is said and done and remembered") {
    RunFolder folder;
    require_success(tiny(folder, "--warmup 1 --steps 4 --out out"));
    const std::string resume = "--device cpu --resume out --eval-every 0 --log log ";
    const Ended same = train(folder, resume + "--steps 4 --plan --lr 0.003 --clip 1.0");
    CHECK(!contains(same.out, "changed: "));
    const std::string flags = "--steps 6 --lr 1e-4 --warmup 0 --weight-decay 0 --clip 0.1 --save-every 5 ";
    char rate[20];
    std::snprintf(rate, sizeof rate, "%.3e", learning_rate(1e-4, 0, 6, 4));
    const std::string sentence =
        "changed: after step 4: --steps 6 (before: 4), --lr 0.0001 (before: 0.003), --warmup 0 (before: 1), "
        "--weight-decay 0.0 (before: 0.1), --clip 0.1 (before: 1.0); the next step's learning rate is " +
        std::string(rate) +
        " (before: 3.000e-04)\n"
        "Earlier steps ran with the earlier values of these flags.\n";
    const Ended changed = train(folder, resume + flags + "--out two");
    require_success(changed);
    CHECK(contains(changed.out, sentence));
    CHECK(logged(folder, "step").back().at("lr") == double(learning_rate(1e-4, 0, 6, 5)));
    const Ended again = train(folder, "--device cpu --resume two/step-000005 --out three");
    require_success(again);
    CHECK(contains(again.out, sentence));
    check_same(folder, "two/step-000006", "three/step-000006");
    // What does not concern the schedule does not speak of it.
    const Ended clip = train(folder, "--device cpu --resume two/step-000005 --out four --clip 2");
    CHECK(contains(clip.out, "changed: after step 5: --clip 2.0 (before: 0.1)\n"));
    CHECK(!contains(train(folder, "--device cpu --resume out --steps 0").out, "changed: "));
}

TEST_CASE("train: --val names what is held out; a run that goes on needs it unchanged") {
    RunFolder folder;
    folder.write("held", "int main() { return sizeof(long) * 2 + strlen(\"held out\"); }\n");
    const std::string held = read_file(folder.path / "held"), text = read_file(folder.path / "text");
    const Ended whole = tiny(folder, "--val held --steps 4 --out whole --eval-every 2");
    require_success(whole);
    CHECK(contains(whole.out, concat("\ntext: text, ", with_commas(std::ssize(text)), " tokens to train on, ",
                                     held.size(), " held out: --val held\n")));
    CHECK(contains(whole.out, "validation | step 4 | loss "));
    require_success(tiny(folder, "--val held --steps 4 --save-every 2 --out parts"));
    folder.write("other", held + held);
    const std::string resume = "--device cpu --resume parts/step-000002 --out again ";
    check_rejected(
        folder, resume + "--val other",
        "--val \"other\" is not the data of the checkpoint's run, which had --val \"held\"; leave it "
        "out, or begin a new run from its weights: --model parts/step-000002.");
    check_rejected(folder, resume + "--val ''", "--val \"\" is not the data of the checkpoint's run");
    check_rejected(folder, resume + "--data held", "--data \"held\" is not the data of the checkpoint's run");
    folder.write("held", held + "x");
    check_rejected(folder, resume, "--data or --val was changed since the checkpoint's run: held has ");
    folder.write("held", held);
    require_success(train(folder, resume));
    check_same(folder, "whole/step-000004", "again/step-000004");
    // Nothing is left to train on, but it can be evaluated.
    check_rejected(folder, TINY + "--data held --val held --steps 1 --out new",
                   "--data has 0 tokens to train on (without those of --val),");
    check_rejected(folder, TINY + "--val held --seq 256 --steps 1 --out new",
                   "tokens held out (--val held), too few for 1 sequence of --seq 256; give more text");
    require_success(tiny(folder, "--data held --val held --steps 0"));
}

TEST_CASE("train: the log has times and its run; --resume continues it; a file may hold several runs") {
    RunFolder folder;
    const std::string flags = "--eval-every 0 --save-every 2 ";
    require_success(tiny(folder, flags + "--steps 4 --out out --log log"));
    auto settings = [&] { return logged(folder, "settings").back(); };
    const std::string first = settings().at("run_started"), date = settings().at("date");
    CHECK(first.size() == 24);
    CHECK(date >= first);
    CHECK(date.substr(0, 2) == "20");
    CHECK(date.back() == 'Z');
    double before = 0;
    for (const std::string& line : lines_of(read_file(folder.path / "log"))) {
        const double seconds = nlohmann::json::parse(line).at("seconds");
        CHECK(seconds >= before);
        CHECK(seconds < 300);
        before = seconds;
    }
    // A resumed run continues its log also where the last line was cut off, but no evaluation does.
    folder.write("log", read_file(folder / "log") + "{\"kind\": \"st");
    const Ended more = train(folder, "--device cpu --resume out --steps 6");
    require_success(more);
    CHECK(contains(more.out, "log: log; what the file has stays, new lines follow it\n"));
    require_success(train(folder, "--device cpu --resume out --steps 0"));
    // The new line after the broken one is whole: the settings of the resumed run.
    std::vector<std::string> whole;
    int64_t broken = 0;
    for (const std::string& line : lines_of(read_file(folder.path / "log"))) {
        if (!nlohmann::json::accept(line)) broken++;
        else whole.push_back(nlohmann::json::parse(line).at("kind"));
    }
    CHECK(broken == 1);
    CHECK(std::count(whole.begin(), whole.end(), "settings") == 2);
    CHECK(std::count(whole.begin(), whole.end(), "step") == 6);
    write_file(folder.path / "log",
               read_file(folder / "log").substr(read_file(folder / "log").rfind("{\"kind\":\"set")));
    CHECK(settings().at("run_started") == first);
    CHECK(settings().at("date") > date);
    CHECK(settings().at("step") == 4);
    // Another run writes after it, and says that it is another.
    require_success(tiny(folder, flags + "--steps 1 --out '' --log log"));
    CHECK(logged(folder, "settings").size() == 2);
    CHECK(settings().at("run_started") > first);
    fs::remove(folder.path / "log");
    CHECK(contains(train(folder, "--device cpu --resume out --steps 7").out,
                   "log: log; the file of the checkpoint's"));
    CHECK(logged(folder, "step").size() == 1);
    CHECK(settings().at("run_started") == first);
    require_success(train(folder, "--device cpu --resume out --steps 8 --log ''"));
    CHECK(logged(folder, "step").size() == 1);
}

TEST_CASE("train: to continue a run that is complete says so and how and changes nothing") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 3 --accumulate 2 --out out"));
    const auto before = folder.files();
    for (const std::string flags : {"", "--steps 3", "--steps 2 --ranks 2", "--out other"}) {
        CAPTURE(flags);
        const Ended ended = train(folder, "--device cpu --resume out " + flags);
        CHECK(ended.code == 0);
        CHECK(ended.error.empty());
        CHECK(
            contains(ended.out, "The run is complete: out/step-000003 is its step 3. To continue it, give "));
        CHECK(folder.files() == before);
    }
}

TEST_CASE("train: fewer --steps than a run has made are rejected if the run has not ended") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 3 --save-every 2 --out out"));
    for (const char* steps : {"1", "2"})
        check_rejected(folder, concat("--device cpu --resume out/step-000002 --out other --steps ", steps),
                       concat("--steps ", steps,
                              " is not above step 2, which the run has reached; leave it out "
                              "to go on to step 3."));
}

TEST_CASE("train: several ranks print and validate and log the numbers of one rank once") {
    RunFolder folder;
    const std::string flags = TINY + "--recipe fp32 --steps 3 --eval-every 0 --out '' ";
    const Ended one = train(folder, flags + "--accumulate 6");
    require_success(one);
    const std::string expected = numbers_in(one.out);
    CHECK(std::count(expected.begin(), expected.end(), '\n') == 5);
    for (const int ranks : {2, 3}) {
        fs::remove(folder.path / "log");
        const Ended ended =
            train(folder, concat(flags, "--log log --ranks ", ranks, " --accumulate ", 6 / ranks));
        require_success(ended);
        CHECK(ended.error.empty());
        CHECK(numbers_in(ended.out) == expected);
        CHECK(logged(folder, "settings").at(0).at("ranks") == ranks);
        for (const auto& line : logged(folder, "step"))
            CHECK(line.at("tokens_per_second").get<double>() * line.at("ms").get<double>() / 1e3 ==
                  doctest::Approx(6 * 2 * 16));  // of all ranks
    }
    require_success(two_by_hand(folder, flags + "--accumulate 3", flags + "--accumulate 3"));
    CHECK(numbers_in(read_file(folder.path / "out0")) == expected);
    CHECK(read_file(folder.path / "out1").empty());  // rank 0 alone prints
    // The report counts the moments of all ranks.
    auto report = [&](const std::string& ranks) {
        const std::string out =
            tiny(folder, "--recipe fp32 --optimizer coat --steps 1 --out '' " + ranks).out;
        CHECK(number_after(out, "first moments     |") > 0);
        return out.substr(out.find("first moments"), out.find("\n\nDone") - out.find("first moments"));
    };
    CHECK(report("--accumulate 6") == report("--ranks 2 --accumulate 3"));
}

TEST_CASE("train: the validation loss is over the same tokens for any batch and number of ranks") {
    RunFolder folder;
    const int64_t held_out = int64_t(read_file(folder.path / "text").size() + 9) / 10;
    // Windows of 16 tokens: 62 of them, which neither 3 nor 16 divides; all that there are; and one, because
    // a validation has at least one.
    for (const auto& [eval_tokens, evaluated] :
         {std::pair{1000, int64_t(992)}, {1000000, (held_out - 1) / 16 * 16}, {1, int64_t(16)}})
        for (const std::string recipe : {"fp32", "coat"}) {
            double first = 0;
            for (const auto& [batch, ranks] : {std::pair{1, 1}, {3, 1}, {16, 1}, {1, 2}, {16, 2}}) {
                CAPTURE(recipe);
                INFO(eval_tokens, " tokens, --batch ", batch, " --ranks ", ranks);
                fs::remove(folder.path / "log");
                const Ended ended =
                    tiny(folder, concat("--steps 0 --log log --recipe ", recipe, " --batch ", batch,
                                        " --ranks ", ranks, " --eval-tokens ", eval_tokens));
                require_success(ended);
                const auto line = logged(folder, "validation").at(0);
                CHECK(line.at("tokens") == evaluated);
                CHECK(contains(ended.out, concat(" | ", with_noun(evaluated, "token"), "\n")));
                const double loss = line.at("loss");
                if (first == 0) first = loss;
                // FP8 operands of a micro-batch share a scale, so that their rounding depends on the batch.
                CHECK(loss == doctest::Approx(first).epsilon(recipe == "fp32" ? 1e-12 : 2e-4));
            }
        }
}

TEST_CASE("train: samples continue the held-out text by seed and step to 256 tokens") {
    RunFolder folder;
    const std::string text = read_file(folder.path / "text");
    const std::string prompt = text.substr(text.size() * 9 / 10, 16);  // the last tenth is held out
    const std::string flags = TINY +
                              "--model model --recipe fp32 --seq 256 --batch 1 --lr 0 --eval-every 0 "
                              "--sample-every 1 --out '' --log log ";
    // All embeddings are one vector, which no layer changes; the head's rows are multiples of it. So the
    // logit of a token is known, whatever comes before: 0 for 'a', -1.6 for 'b', below -30 for others.
    const std::unique_ptr<Model> model = small_reference(1, 16);
    for (const Param& p : parameters(small_config())) {
        const bool ones = p.rows == 1 || p.name == "embedding";
        std::vector<uint16_t> w(size_t(p.size()), reference::to_bf16(ones ? 1.0f : 0.0f));
        for (size_t i = 0; p.name == "head" && i < w.size(); i++) {
            const size_t token = i / size_t(p.cols);
            w[i] = reference::to_bf16((token == 'a' ? 0.0f : token == 'b' ? -1.6f : -32.0f) / float(p.cols));
        }
        model->write(p.name, w.data());
    }
    fs::create_directory(folder.path / "model");
    save_model_folder(folder / "model", *model, {});
    const Ended known = train(folder, flags + "--steps 6");
    require_success(known);
    require_success(train(folder, flags + "--steps 1 --seed 2"));
    std::set<Tokens> different;
    double a = 0, b = 0;
    for (const auto& line : logged(folder, "sample")) {
        const Tokens tokens = line.at("tokens");
        REQUIRE(tokens.size() == 256);
        CHECK(std::string(tokens.begin(), tokens.begin() + 16) == prompt);
        a += double(std::count(tokens.begin() + 16, tokens.end(), 'a'));
        b += double(std::count(tokens.begin() + 16, tokens.end(), 'b'));
        different.insert(tokens);
    }
    CHECK((different.size() == 7 && a + b == 7 * 240));  // another step or seed draws another sample
    const double p = 1 / (1 + std::exp(1.6 / 0.8));
    CHECK(std::fabs(b / (a + b) - p) < 4 * std::sqrt(p * (1 - p) / (a + b)));
    CHECK(contains(known.out, "\n" + prompt));
    // With token files a sample ends at the token that ends a text.
    std::vector<std::string> bytes;
    for (int byte = 0; byte < 256; byte++) bytes.push_back(std::string(1, char(byte)));
    folder.write("tokens/text.bin", token_file(std::vector<uint16_t>(text.begin(), text.end())));
    folder.write("tokens/tokenizer.bin", tokenizer_file(bytes, 'b'));
    require_success(train(folder, flags + "--steps 1 --data tokens"));
    const Tokens ended = logged(folder, "sample").back().at("tokens");
    CHECK(ended.back() == 'b');
    CHECK(ended.size() < 256);
    CHECK(std::find(ended.begin() + 16, ended.end(), 'b') == ended.end() - 1);
    // A sequence that has no room for more than the prompt gives no sample.
    CHECK(!contains(tiny(folder, "--steps 1 --sample-every 1 --out ''").out, "sample |"));
}

TEST_CASE("train: token files say the vocabulary of a model without one; packed conversations also --seq") {
    Folder folder;
    folder.write("tokens/train.bin", token_file(std::vector<uint16_t>(2000, 7), 32));
    folder.write("tokens/tokenizer.bin", tokenizer_file(std::vector<std::string>(11, "x")));
    const Ended ended = train(folder, "--device cpu --data tokens --batch 2 --steps 0 --out ''");
    require_success(ended);
    CHECK(contains(ended.out, "vocabulary 11; "));
    CHECK(contains(ended.out, "1 micro-batch of 2 x 32\n"));
    check_rejected(folder, "--device cpu --data tokens --seq 16", "give --seq 32");
}

TEST_CASE("train: saves after --save-every steps; else about every half hour; not after a skipped step") {
    RunFolder folder;
    for (const auto& [minute, flags, expected] :
         {std::tuple{"60", "--steps 5 --save-every 2 --out a", "2 4 5 "},
          {"60", "--steps 5 --out b", "5 "},
          {"1e-9", "--steps 4 --out c", "1 2 3 4 "},  // half an hour is over after each step
          {"1e-9", "--steps 4 --out d --ranks 2", "1 2 3 4 "},
          {"1e-9", "--steps 7 --out e --save-every 3", "3 6 7 "},  // the clock does not count
          {"1e-9", "--steps 2 --out ''", ""}}) {
        INFO(std::string(flags));
        const Ended ended = shell(folder, concat("COAT_MINUTE=", minute, " train", TINY, flags));
        require_success(ended);
        std::string steps;
        for (const std::string& line : lines_of(ended.out))
            if (line.rfind("saved | step ", 0) == 0) steps += line.substr(13, line.find(' ', 13) - 12);
        CHECK(steps == expected);
    }
}

TEST_CASE("train: a run takes the steps of its model bit for bit and validates on its held-out batches") {
    Folder folder;
    std::vector<uint32_t> tokens, held_out;
    for (uint32_t i = 0; i < 1601; i++) {
        tokens.push_back(i * i % 251 | uint32_t(i >= 80) << 31);  // most steps have no token that counts
        held_out.push_back(i * i % 251 | uint32_t(i < 900 && i % 7) << 31);  // batches in which fewer count
    }
    folder.write("train.bin", token_file(tokens));
    folder.write("val.bin", token_file(held_out));
    const std::string flags =
        "--device cpu --model \"$SMALL\" --recipe fp32 --data train.bin,val.bin --batch 1 --seq 16 --log log "
        "--accumulate 2 --warmup 9 --lr 2e-3 --weight-decay 3 --clip 5 --eval-every 0 --sample-every 0 "
        "--eval-tokens 335 ";
    require_success(train(folder, flags + "--steps 0 --ranks 3"));  // in the last round one has no window
    const Ended ended = train(folder, flags + "--steps 80");
    require_success(ended);
    CHECK(contains(ended.out, "skipped: no token counts"));
    const std::unique_ptr<Model> model = small_reference(1, 16, 2);
    const Corpus corpus = load_corpus((folder / "train.bin") + "," + (folder / "val.bin"));
    Tokens x(32), y(32);
    auto validation = [&] {  // the mean over all scored targets of 20 windows: 335 tokens at most
        const Loader loader(corpus.validation, 1, 16, 0);
        double loss = 0, targets = 0;
        for (int64_t i = 0; i < 20; i++) {
            loader.read(i, x.data(), y.data());
            const double counted = double(count_scored_targets(y.data(), 16));
            loss += model->validation_loss(x.data(), y.data()) * counted;
            targets += counted;
        }
        return doctest::Approx(loss / targets).epsilon(1e-9);
    };
    const auto validations = logged(folder, "validation");
    for (int i : {0, 1}) CHECK(validations.at(i).at("loss").get<double>() == validation());
    const Loader loader(corpus.train, 1, 16, 1);
    LoopState state;
    int64_t in_a_row = 0, most = 0;
    for (const auto& line : logged(folder, "step")) {
        for (int64_t i : {0, 1}) loader.read(2 * state.step + i, &x[16 * i], &y[16 * i]);
        AdamWOptions adamw{state.updates + 1, learning_rate(2e-3, 9, 80, state.step)};
        adamw.weight_decay = 3;
        adamw.clip = 5;
        const StepResult result = model->step(x.data(), y.data(), adamw);
        state.step++;
        state.updates += !result.skipped;
        CHECK(line.at("loss") == result.loss);
        CHECK(line.at("skipped") == result.skipped);
        CHECK(line.at("lr") == double(adamw.lr));
        CHECK(line.at("grad_norm") == result.grad_norm);
        in_a_row = result.skipped ? in_a_row + 1 : 0;
        most = std::max(most, in_a_row);
    }
    CHECK((most > 20 && state.updates > 3));  // more than SKIPS_OF_DIVERGED_RUN: it has not diverged
    CHECK(read_saved_run(folder / "out/step-000080").state.updates == state.updates);
    const std::string mine = save_checkpoint(folder / "mine", *model, {.state = state}, {});
    CHECK((tensors_of(folder.path / "out/step-000080") == tensors_of(mine)));
    CHECK(validations.at(2).at("loss").get<double>() == validation());
}
