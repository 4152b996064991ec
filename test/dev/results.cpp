// results.cpp - dev/results.py: what it finds slower in a bench than in the recorded one, and what it
// records.
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

// A bench of one run with two operators and a whole step, as dev/bench.cu writes it.
static nlohmann::json bench(double gemm, double norm, double step, const char* device = "H200") {
    const nlohmann::json operators = {{{"group", "linear layers"}, {"name", "qkv"}, {"seconds", gemm}},
                                      {{"group", "between"}, {"name", "norm"}, {"seconds", norm}}};
    return {{"device", device},
            {"commit", "1234567"},
            {"runs",
             {{{"model", "gpt2"},
               {"recipe", "coat"},
               {"batch", 64},
               {"seq", 1024},
               {"accumulate", 8},
               {"operators", operators},
               {"step", {{"seconds", step}}}}}}};
}

PYTHON_TEST_CASE("results.py: slower names each operator that takes more than a twentieth longer") {
    const Folder folder;
    auto slower = [&](const nlohmann::json& measured) {
        folder.write("benches.json", nlohmann::json({measured, bench(1e-3, 2e-5, 0.5)}).dump());
        return python_lines(folder,
                            "import json, sys, results\n"
                            "sys.exit(results.name_slower(*json.load(open('benches.json'))))\n");
    };
    const std::string run = "gpt2 coat 64 1024 8: ";
    const Ended same = slower(bench(1.04e-3, 1e-5, 0.52));
    CHECK(same.code == 0);
    CHECK(same.out == "0 of 3 are more than 5% slower.\n");
    const Ended norm = slower(bench(1e-3, 2.2e-5, 0.5));
    CHECK(norm.code == 1);
    CHECK(norm.out == run +
                          "norm: 22.0 us, 10.0% more than 20.0 us at 1234567\n"
                          "1 of 3 are more than 5% slower.\n");
    CHECK(contains(slower(bench(1e-3, 2e-5, 0.53)).out, run + "whole step: 530000.0 us"));
    // A new operator is named; what cannot be compared is no success.
    nlohmann::json more = bench(1e-3, 2e-5, 0.5);
    more["runs"][0]["operators"].push_back({{"name", "rope"}, {"seconds", 1e-5}});
    const Ended added = slower(more);
    CHECK(added.code == 0);
    CHECK(contains(added.out, run + "rope: is not in the recorded bench\n"));
    more["runs"][0]["model"] = "gpt2-xl";
    const Ended other = slower(more);
    CHECK(other.code == 1);
    CHECK(contains(other.out, "No operator of this bench is in the recorded one"));
    const Ended device = slower(bench(1e-3, 2e-5, 0.5, "H100"));
    CHECK(device.code == 1);
    CHECK(contains(device.out, "This is an H100"));
}

// A copy of dev/ in which make does nothing, nvidia-smi finds one GPU or two, and all tests of GPUs pass, but
// for one run of dev/gpu.sh.
PYTHON_TEST_CASE("results.py: a run is recorded when it ends and the next call runs what is missing") {
    const Folder folder;
    fs::copy("dev", folder.path / "dev", fs::copy_options::recursive);
    folder.write("make", "#!/bin/sh\n");
    folder.write("nvidia-smi", "#!/bin/sh\necho H200\n[ ! -e two ] || echo H200\n");
    folder.write("dev/gpu.sh",
                 "#!/bin/sh\n[ \"$1 $2\" != 'seeds 11' ] || [ -e good ] || exit 1\necho \"$1: passed\"\n");
    folder.write("build/tests", "#!/bin/sh\necho '8 passed'\n");
    for (const char* program : {"make", "nvidia-smi", "dev/gpu.sh", "build/tests"})
        fs::permissions(folder.path / program, fs::perms::owner_all);
    const std::string measure = "PATH=$PWD:$PATH OUT=out python3 dev/results.py tests";
    fs::create_directory(folder.path / "out");
    const std::string last = "kernels, seeds 11 to 20";
    const Ended first = shell(folder, "COAT_COMMIT=old " + measure);
    CHECK(first.code == 1);
    CHECK(contains(first.out, "tests: " + last + ": FAILED"));
    auto tests = nlohmann::json::parse(read_file(folder / "out/results.json")).at("tests");
    CHECK(tests.at("all").at("says") == "gpu: passed");
    CHECK(tests.at("all").at("commit") == "old");
    CHECK((!tests.contains(last) || tests.at(last).at("commit") != "old"));

    folder.write("good", "");
    const Ended second = shell(folder, "COAT_COMMIT=old " + measure);
    CHECK(second.code == 0);
    CHECK(lines_of(second.out).size() == 1);
    CHECK(contains(second.out, "tests: " + last + ": done"));
    CHECK(contains(read_file(folder / "dev/RESULTS.md"), "| seeds: passed | H200 | old |"));
    CHECK(read_file(folder / "out/results.json") == read_file(folder / "dev/results.json"));
    CHECK(lines_of(shell(folder, "COAT_COMMIT=new " + measure).out).size() == 3);  // another commit

    folder.write("two", "");  // then the tests of several GPUs run, too
    const Ended third = shell(folder, "COAT_COMMIT=new " + measure);
    CHECK(lines_of(third.out).size() == 1);
    CHECK(contains(third.out, "tests: several GPUs: done"));
    tests = nlohmann::json::parse(read_file(folder / "out/results.json")).at("tests");
    CHECK(tests.at("all").at("where") == "H200");
    CHECK(tests.at("several GPUs").at("where") == "2 H200");
}

PYTHON_TEST_CASE("results.py: page makes the page again; a run that no command makes is an error") {
    const Folder folder;
    fs::copy("dev", folder.path / "dev", fs::copy_options::recursive);
    const std::string page = "python3 -W error dev/results.py page";
    require_success(shell(folder, page));
    CHECK(read_file(folder / "dev/RESULTS.md") == read_file("dev/RESULTS.md"));
    auto recorded = nlohmann::json::parse(read_file("dev/results.json"));
    recorded["speed"]["an old model"] = recorded["speed"]["7b coat"];
    folder.write("dev/results.json", recorded.dump());
    check_failed(shell(folder, page), "results.py: ", "no command makes: speed: an old model.");
}
