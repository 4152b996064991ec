// main.cpp - runs every test. The last line is for scripts and people: "N passed, N failed, N skipped".
//
// A test is skipped only by its own decorator (doctest::skip), as GPU tests are where there is no GPU. Of the
// tests that the command line chooses, those that are skipped are listed by name. Where all tests run, four
// processes share them: this one has all that compute with a model or use a GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <omp.h>
#include <set>
#include <string>
#include <vector>

#include "../program/start.h"

namespace {

// Collects the names of the tests that the command line chooses; nothing is run or printed.
struct Chosen : doctest::ConsoleReporter {
    inline static std::set<std::string> names;

    using ConsoleReporter::ConsoleReporter;
    void report_query(const doctest::QueryData& found) override {
        for (unsigned i = 0; i < found.num_data; i++) names.insert(found.data[i]->m_name);
    }
};
REGISTER_REPORTER("chosen", 0, Chosen);

struct Tally : doctest::ConsoleReporter {
    inline static std::vector<std::string> skipped;
    inline static unsigned tests = 0, failed = 0;

    using ConsoleReporter::ConsoleReporter;
    void test_case_skipped(const doctest::TestCaseData& test) override {
        if (test.m_skip && Chosen::names.count(test.m_name)) skipped.push_back(test.m_name);
    }
    void test_run_end(const doctest::TestRunStats& run) override {
        ConsoleReporter::test_run_end(run);
        tests = run.numTestCasesPassingFilters;
        failed = run.numTestCasesFailed;
    }
};
REGISTER_REPORTER("tally", 0, Tally);

}  // namespace

// The names of the tests that the command line chooses, with those that are skipped.
static void choose(int argc, char** argv) {
    std::vector<const char*> arguments(argv, argv + argc);
    arguments.push_back("--list-test-cases");
    arguments.push_back("--no-skip");
    doctest::Context context(int(arguments.size()), arguments.data());
    context.addFilter("reporters", "chosen");
    context.run();
}

// Starts another process with the tests of these source files. It prints into a file, so that it never waits
// for this one.
static std::FILE* start(const std::string& program, const std::string& sources, const std::string& output) {
    const std::string threads = "OMP_NUM_THREADS=" + std::to_string(omp_get_max_threads());
    return popen((threads + " '" + program + "' '--source-file=" + sources + "' > '" + output + "'").c_str(),
                 "r");
}

TEST_CASE("main: only tests that the command line chooses are counted as skipped") {
    char last[100] = "";
    std::FILE* const other = popen("/proc/$PPID/exe --test-case='no such test' | tail -n 1", "r");
    CHECK(std::fgets(last, sizeof last, other) != nullptr);
    pclose(other);
    CHECK(std::string(last) == "0 passed, 0 failed, 0 skipped\n");
}

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is stopped has printed what it did
    coat::never_return_memory_to_system();
    // None of these tests uses a GPU. Many wait for programs that they start.
    const std::string groups[] = {"*test/train_*,*test/generate.cpp", "*test/processes.cpp,*test/data/*",
                                  "*test/dev/*.cpp"};
    choose(argc, argv);
    std::vector<std::pair<std::FILE*, std::string>> others;  // and their output
    doctest::Context context(argc, argv);
    context.addFilter("reporters", "tally");
    if (argc == 1) {
        omp_set_num_threads((omp_get_num_procs() + 1) / 2);
        for (const std::string& sources : groups) {
            const std::string output = argv[0] + ("." + std::to_string(others.size() + 1));
            others.push_back({start(argv[0], sources, output), output});
            context.addFilter("source-file-exclude", sources.c_str());
        }
    }
    int status = context.run();
    if (context.shouldExit()) return status;  // --list-test-cases and the like
    unsigned passed = Tally::tests - Tally::failed, failed = Tally::failed;
    for (const auto& [other, output] : others) {
        status |= pclose(other);
        unsigned also_passed = 0, also_failed = 1;  // unless the process says so
        std::ifstream file(output);
        for (std::string line; std::getline(file, line);)
            if (std::sscanf(line.c_str(), "%u passed, %u failed", &also_passed, &also_failed) < 2 &&
                !line.starts_with("skipped: "))  // this process has counted them
                std::printf("%s\n", line.c_str());
        passed += also_passed;
        failed += also_failed;
    }
    for (const std::string& name : Tally::skipped) std::printf("skipped: %s\n", name.c_str());
    if (passed + failed == 0) std::printf("no test has such a name\n");
    std::printf("%u passed, %u failed, %zu skipped\n", passed, failed, Tally::skipped.size());
    return status || passed + failed == 0;
}
