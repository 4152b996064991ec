// test_train_files.cpp - ./train with files that it cannot read, write or own: one sentence, exit code 1, and no
// file lost or half-written.
#include <doctest/doctest.h>

#include <filesystem>

#include "../../data/checkpoint.h"
#include "../../plan.h"
#include "../program.h"

using namespace coat;
using namespace coat::test;

namespace {

namespace fs = std::filesystem;

}  // namespace

TEST_CASE("train: a folder or file that cannot be written is rejected before training") {
    Folder folder;
    check_refused(folder, TINY + std::string("--steps 2 --out text/out"), "--out");
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log nowhere/log"), "--log");
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log /"), "--log");
}

TEST_CASE("train: a full disk leaves no partial checkpoint, and keeps the previous one") {
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

TEST_CASE("train: --log replaces another log and no other file") {
    Folder folder;
    check_refused(folder, TINY + std::string("--steps 2 --out '' --log text"), "--log");  // the text that it would train on
    require_success(tiny(folder, "--steps 4 --out '' --log log"));
    require_success(tiny(folder, "--steps 2 --out '' --log log"));
    CHECK(read_file(folder.path / "log").find("\"step\":4") == std::string::npos);
    const Ended piped = shell(folder, "'" + program() + "'" + TINY + "--steps 2 --out '' --log /dev/stdout | cat");
    CHECK(piped.out.find("{\"kind\":\"settings\"") != std::string::npos);
}

TEST_CASE("train: a folder is locked by one run at a time") {
    Folder folder;
    const std::string run = "'" + program() + "'" + TINY;
    const Ended second = shell(folder, run + "--steps 100000 --out shared > /dev/null & first=$!\n"
                                       "while [ ! -e shared ]; do sleep 0.05; done; sleep 0.3\n" +
                                       run + "--steps 2 --out shared > /dev/null; code=$?; kill -INT $first; wait $first; exit $code");
    check_one_sentence(second, "--out shared");
    require_success(tiny(folder, "--steps 2 --out other"));
}

TEST_CASE("train: a checkpoint that is missing, damaged or of another run is rejected") {
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
    const std::string field = "\"norm_correction\": [";  // gets one bucket more than the model has
    write_file(trainer, state.replace(state.find(field), field.size(), field + "1.5, "));
    check_refused(folder, "--device cpu --resume lean --steps 4", "norm_correction");
}
