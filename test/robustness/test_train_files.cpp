// test_train_files.cpp - ./train with files that it cannot read or write, or that belong to others. It prints
// one sentence, returns 1, and no file is lost or half-written.
#include <doctest/doctest.h>

#include "../program.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("train: a folder or file that cannot be written is rejected before training") {
    RunFolder folder;
    check_rejected(folder, TINY + "--steps 2 --out text/out", "--out");
    check_rejected(folder, TINY + "--steps 2 --out '' --log nowhere/log", "--log");
    check_rejected(folder, TINY + "--steps 2 --out '' --log /", "--log");
}

TEST_CASE("train: a full disk leaves no partial checkpoint, and keeps the previous one") {
    RunFolder folder;
    const std::string run = "'" + program() + "'" + TINY;
    // A limit on the size of a file stands for a full disk: a checkpoint of this model has files of more than
    // a megabyte.
    check_one_sentence(shell(folder, "ulimit -f 100; " + run + "--steps 2 --out full"), "full");
    CHECK((!fs::exists(folder.path / "full") || fs::is_empty(folder.path / "full")));
    require_success(tiny(folder, "--steps 2 --schedule constant --out kept"));
    const auto before = folder.files();
    check_one_sentence(
        shell(folder, "ulimit -f 100; '" + program() + "' --device cpu --resume kept --steps 4"), "kept");
    CHECK(folder.files() == before);
    // A log that cannot be written does not stop the run.
    const Ended logged = shell(folder, "ulimit -f 1; " + run + "--steps 2 --out '' --log log > /dev/null");
    CHECK(logged.code == 0);
    CHECK(logged.error.compare(0, 16, "train: --log log") == 0);
    CHECK(logged.error.find('\n') == logged.error.size() - 1);
}

TEST_CASE("train: --log replaces the log of an earlier training, and no other file") {
    RunFolder folder;
    // The text to train on is no log.
    check_rejected(folder, TINY + "--steps 2 --out '' --log text", "--log");
    require_success(tiny(folder, "--steps 4 --out '' --log log"));
    require_success(tiny(folder, "--steps 2 --out '' --log log"));
    const std::string log = read_file(folder.path / "log");
    CHECK(!contains(log, "\"step\":4"));
    require_success(tiny(folder, "--steps 0 --out '' --log log"));  // an evaluation appends
    CHECK(read_file(folder.path / "log").compare(0, log.size(), log) == 0);
    const Ended piped =
        shell(folder, "'" + program() + "'" + TINY + "--steps 2 --out '' --log /dev/stdout | cat");
    CHECK(contains(piped.out, "{\"kind\":\"settings\""));
}

TEST_CASE("train: a log that cannot be written and a missing file are errors before the model is made") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 2 --out kept --log log"));
    const std::string optimizer = folder.path / "kept/step-000002/optimizer.safetensors";
    const std::string resume = " --device cpu --resume kept/step-000002 --steps 4 --out '' ";
    // A changed byte is found when the file is loaded; a wrong --log before that.
    std::string bytes = read_file(optimizer);
    bytes.back() ^= 1;
    write_file(optimizer, bytes);
    check_rejected(folder, resume + "--log nowhere/log", "--log");
    fs::remove(optimizer);
    check_rejected(folder, resume + "--log nowhere/log", "optimizer.safetensors");
    // A damaged checkpoint is still no folder for a new run.
    check_rejected(folder, TINY + "--steps 2 --out kept/step-000002", "kept/step-000002");
}

TEST_CASE("train: a folder is locked by one run at a time") {
    RunFolder folder;
    const std::string run = "'" + program() + "'" + TINY;
    const Ended second = shell(
        folder, run +
                    "--steps 100000 --out shared > /dev/null & first=$!\n"
                    "while [ ! -e shared ]; do sleep 0.05; done; sleep 0.3\n" +
                    run +
                    "--steps 2 --out shared > /dev/null; code=$?; kill -INT $first; wait $first; exit $code");
    check_one_sentence(second, "--out shared");
    require_success(tiny(folder, "--steps 2 --out other"));
}

TEST_CASE("train: a checkpoint that is missing, damaged or of another run is rejected") {
    RunFolder folder;
    check_rejected(folder, "--device cpu --resume nowhere", "nowhere");
    fs::create_directory(folder.path / "hollow");
    check_rejected(folder, "--device cpu --resume hollow", "hollow");
    require_success(tiny(folder, "--steps 2"));  // writes out/
    const std::string resume = "--device cpu --resume out --steps 4 ";
    check_rejected(folder, resume + "--recipe fp32", "--recipe");
    check_rejected(folder, resume + "--optimizer fp8", "--optimizer");
    check_rejected(folder, resume + "--attention groups", "--attention");
    check_rejected(folder, resume + "--master none", "--master");
    check_rejected(folder, resume + "--gradients none --clip 0", "--gradients");
    check_rejected(folder, resume + "--model gpt2-tiny", "--model");
    check_rejected(folder, resume + "--batch 4", "--batch");
    check_rejected(folder, resume + "--seq 32", "--seq");
    check_rejected(folder, resume + "--lr 1e-4", "--lr");
    check_rejected(folder, resume + "--seed 2", "--seed");
    check_rejected(folder, "--device cpu --resume out --steps 1", "--steps");
    check_rejected(folder, "--device cpu --resume out", "--steps");
    // This would replace the checkpoint of another run.
    check_rejected(folder, TINY + "--steps 2", "--out");
    const std::string text = read_file(folder.path / "text");
    write_file(folder.path / "other", std::string(50000, 'a'));
    check_rejected(folder, resume + "--data other", "--data");
    // As many tokens, in another order.
    write_file(folder.path / "reversed", std::string(text.rbegin(), text.rend()));
    check_rejected(folder, resume + "--data reversed", "--data");
    CHECK(train(folder, "--device cpu --plan --resume out").code == 0);  // also of a finished run

    const fs::path checkpoint = folder.path / "out" / "step-000002";
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"}) {
        const std::string whole = read_file(checkpoint / file);
        for (const std::string& damaged :
             {whole.substr(0, whole.size() / 2), std::string(), std::string("[]")}) {
            write_file(checkpoint / file, damaged);
            check_rejected(folder, "--device cpu --resume out/step-000002 --steps 4", "step-000002");
        }
        fs::remove(checkpoint / file);
        check_rejected(folder, "--device cpu --resume out/step-000002 --steps 4", "step-000002");
        write_file(checkpoint / file, whole);
    }
    CHECK(train(folder, resume).code == 0);  // the files are complete again
}
