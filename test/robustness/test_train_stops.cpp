// test_train_stops.cpp - ./train stopped by a signal, or by values that are not finite: the last good
// checkpoint stays.
#include <doctest/doctest.h>

#include "../program.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("train: messages show flags, paths and file contents on one line, without control characters") {
    RunFolder folder;
    check_rejected(folder, "--device cpu --recipe \"$(printf 'a\\nb\\033[31mc')\"", "a\\nb?[31mc");
    check_rejected(folder, "--device cpu --resume \"$(printf 'a\\nb')\"", "a\\nb");
    check_rejected(folder, "--device cpu --resume ''", "--resume");
    // A model that was not trained writes all kinds of bytes.
    const Ended sampled = train(folder,
                                "--device cpu --data text --batch 2 --seq 64 --steps 1 --lr 0 --eval-every "
                                "0 --sample-every 1 --out ''");
    require_success(sampled);
    CHECK(contains(sampled.out, "\xEF\xBF\xBD"));
    CHECK(std::none_of(sampled.out.begin(), sampled.out.end(),
                       [](unsigned char c) { return (c < 32 && c != '\n' && c != '\t') || c == 127; }));
}

TEST_CASE("train: a run that diverges ends with one sentence, and its last good checkpoint stays") {
    RunFolder folder;
    const Ended ended = tiny(folder,
                             "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 "
                             "--eval-every 0 --save-every 2 --out wild");
    check_one_sentence(ended, "20 steps in a row");
    const size_t skipped = ended.out.find("skipped: not finite (1 so far)");
    REQUIRE(skipped != std::string::npos);
    CHECK(ended.out.find("saved | ") < skipped);
    CHECK(ended.out.find("saved | ", skipped) == std::string::npos);
}

TEST_CASE("train: weights that are NaN, or with which activations overflow, are rejected before a step") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 1 --out good"));
    fs::copy(folder.path / "good" / "step-000001", folder.path / "bad");
    std::string weights = read_file(folder.path / "bad" / "model.safetensors");
    for (const auto& [byte, says] : {std::pair{'\xFF', "bad/model.safetensors has NaN"},    // BF16's NaN
                                     {'\x7F', "activations overflow with --model bad"}}) {  // BF16's maximum
        std::fill(weights.end() - 2000, weights.end(), byte);
        write_file(folder.path / "bad" / "model.safetensors", weights);
        check_rejected(folder, TINY + "--steps 2 --out '' --model bad", says);
    }
}

TEST_CASE("train: a signal saves a checkpoint, and resuming it is bit-identical to a run without a stop") {
    RunFolder folder;
    for (const auto& [formats, signal, code] :
         {std::tuple{std::string("--recipe coat"), "INT", 130},
          {"--recipe bf16 --optimizer fp8", "TERM", 143},
          {"--recipe fp32", "HUP", 129},
          {"--attention groups --master none --gradients none --clip 0", "INT", 130}}) {
        CAPTURE(formats);
        fs::remove_all(folder.path / "whole");
        fs::remove_all(folder.path / "parts");
        const std::string flags = formats + " --steps 24 --eval-every 9 --warmup 4 ";
        require_success(tiny(folder, flags + "--out whole"));
        const Ended stopped =
            shell(folder, "mkfifo pipe; '" + program() + "'" + TINY + flags +
                              "--out parts --log log > pipe & pid=$!\n"
                              "while read -r line; do echo \"$line\"; case $line in 'step  2/'*) kill -" +
                              signal +
                              " $pid;; esac; done < pipe\n"
                              "rm pipe; wait $pid");
        CHECK(stopped.code == code);
        CHECK(contains(stopped.out, "--resume parts"));
        REQUIRE_MESSAGE(!fs::exists(folder.path / "parts/step-000024"),
                        "the run ended before it was stopped");
        require_success(train(folder, "--device cpu --resume parts --log log"));
        CHECK(weights_and_state(folder.path / "whole/step-000024") ==
              weights_and_state(folder.path / "parts/step-000024"));

        CHECK(logged(folder, "step").size() == 24);  // every step once
        fs::remove(folder.path / "log");
    }
}

TEST_CASE("train: the command that continues a run quotes a folder that the shell would split") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 1 --out 'my runs'"));
    const Ended again = tiny(folder, "--steps 2 --out 'my runs'");
    CHECK(again.code == 1);
    CHECK(contains(again.error, "continue it with --resume 'my runs', or"));
    const std::string run = "'" + program() + "'" + TINY + "--steps 1000000 --out 'its here' > log &\n";
    const Ended stopped = shell(
        folder, run + "until grep -q '^step' log; do sleep 0.1; done; kill -INT $!; wait; cat log");
    CHECK(contains(stopped.out, "./train --resume 'its here'"));
}

TEST_CASE("train: under nohup a hangup does not stop the run") {
    RunFolder folder;
    const Ended ended =
        shell(folder, "trap '' HUP; '" + program() + "'" + TINY +
                          "--steps 24 --out '' > printed & pid=$!\n"
                          "until grep -q 'step  2/' printed; do sleep 0.02; done; kill -HUP $pid; wait $pid");
    CHECK(ended.code == 0);
    CHECK(contains(read_file(folder.path / "printed"), "Done: 24 steps"));
}
