// test_train_stops.cpp - ./train when it is stopped by a signal, or by values that are not finite: the last
// good checkpoint stays.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../../data/checkpoint.h"
#include "../../plan.h"
#include "../program.h"

using namespace coat;
using namespace coat::test;

namespace {

namespace fs = std::filesystem;

}  // namespace

TEST_CASE(
    "train: messages show flags, paths and file contents on one line, with control characters escaped") {
    Folder folder;
    check_refused(folder, "--device cpu --recipe \"$(printf 'a\\nb\\033[31mc')\"", "a\\nb?[31mc");
    check_refused(folder, "--device cpu --resume \"$(printf 'a\\nb')\"", "a\\nb");
    check_refused(folder, "--device cpu --resume ''", "--resume");
    // A model that has learnt nothing writes bytes of all kinds.
    const Ended sampled = train(folder,
                                "--device cpu --data text --batch 2 --seq 256 --steps 1 --lr 0 --eval-every "
                                "0 --sample-every 1 --out ''");
    require_success(sampled);
    CHECK(sampled.out.find("\xEF\xBF\xBD") != std::string::npos);
    CHECK(std::none_of(sampled.out.begin(), sampled.out.end(),
                       [](unsigned char c) { return (c < 32 && c != '\n' && c != '\t') || c == 127; }));
}

TEST_CASE("train: a run that diverges ends with one sentence, and its last good checkpoint stays") {
    Folder folder;
    const Ended ended = tiny(folder,
                             "--lr 10 --weight-decay 10 --schedule constant --warmup 0 --steps 100 "
                             "--eval-every 0 --save-every 2 --out wild");
    check_one_sentence(ended, "20 steps in a row");
    const size_t skipped = ended.out.find("skipped: not finite (1 so far)");
    REQUIRE(skipped != std::string::npos);
    CHECK(ended.out.find("saved | ") < skipped);
    CHECK(ended.out.find("saved | ", skipped) == std::string::npos);
}

TEST_CASE("train: weights that are not finite are rejected at the first validation") {
    Folder folder;
    require_success(tiny(folder, "--steps 1 --out good"));
    fs::copy(folder.path / "good" / "step-000001", folder.path / "bad");
    std::string weights = read_file(folder.path / "bad" / "model.safetensors");
    std::fill(weights.end() - 2000, weights.end(), '\xFF');  // BF16's NaN
    write_file(folder.path / "bad" / "model.safetensors", weights);
    check_refused(folder, TINY + std::string("--steps 2 --out '' --model bad"), "bad");
}

TEST_CASE(
    "train: a signal saves a checkpoint, and the resumed run is bit-identical to one that was not stopped") {
    Folder folder;
    for (const auto& [formats, signal, code] :
         {std::tuple{std::string("--recipe coat"), "INT", 130},
          {"--recipe bf16 --optimizer fp8", "TERM", 143},
          {"--recipe fp32", "HUP", 129},
          {"--attention groups --master none --gradients none", "INT", 130}}) {
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
        CHECK(stopped.out.find("--resume parts") != std::string::npos);
        REQUIRE_MESSAGE(!fs::exists(folder.path / "parts/step-000024"),
                        "the run ended before it was stopped");
        require_success(train(folder, "--device cpu --resume parts --log log"));
        CHECK(weights_and_state(folder.path / "whole/step-000024") ==
              weights_and_state(folder.path / "parts/step-000024"));

        std::istringstream log(read_file(folder.path / "log"));  // has every step once
        int steps = 0;
        for (std::string line; std::getline(log, line);)
            steps += nlohmann::json::parse(line).at("kind") == "step";
        CHECK(steps == 24);
        fs::remove(folder.path / "log");
    }
}

TEST_CASE("train: under nohup a hangup does not stop the run") {
    Folder folder;
    const Ended ended =
        shell(folder, "trap '' HUP; '" + program() + "'" + TINY +
                          "--steps 24 --out '' > told & pid=$!\n"
                          "until grep -q 'step  2/' told; do sleep 0.02; done; kill -HUP $pid; wait $pid");
    CHECK(ended.code == 0);
    CHECK(read_file(folder.path / "told").find("Done: 24 steps") != std::string::npos);
}
