// main.cpp - runs every test. The last line is for scripts and people: "N passed, N failed, N skipped".
//
// A test is skipped only by its own decorator (doctest::skip), as GPU tests are where there is no GPU.
// Skipped tests are listed by name. Where all tests run, four processes share them: this one has all that
// compute with a model or use a GPU.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <omp.h>
#include <string>
#include <vector>

namespace {

struct Tally : doctest::ConsoleReporter {
    inline static std::vector<std::string> skipped;
    inline static unsigned tests = 0, failed = 0;

    using ConsoleReporter::ConsoleReporter;
    void test_case_skipped(const doctest::TestCaseData& test) override {
        if (test.m_skip) skipped.push_back(test.m_name);  // others were filtered out by the command line
    }
    void test_run_end(const doctest::TestRunStats& run) override {
        ConsoleReporter::test_run_end(run);
        tests = run.numTestCasesPassingFilters;
        failed = run.numTestCasesFailed;
    }
};
REGISTER_REPORTER("tally", 0, Tally);

}  // namespace

// Another process with the tests of these source files, which prints into a pipe.
static std::FILE* start(const char* program, const std::string& sources) {
    const std::string threads = std::to_string(omp_get_max_threads());
    return popen(
        ("OMP_NUM_THREADS=" + threads + " '" + program + "' '--source-file=" + sources + "'").c_str(), "r");
}

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is stopped has printed what it did
    // None of these tests uses a GPU. Many wait for programs that they start.
    const std::string groups[] = {"*test/train_*,*test/generate.cpp", "*test/processes.cpp,*test/data/*",
                                  "*test/dev/*.cpp"};
    std::vector<std::FILE*> others;
    doctest::Context context(argc, argv);
    context.addFilter("reporters", "tally");
    if (argc == 1) {
        omp_set_num_threads((omp_get_num_procs() + 1) / 2);
        for (const std::string& sources : groups) {
            others.push_back(start(argv[0], sources));
            context.addFilter("source-file-exclude", sources.c_str());
        }
    }
    int status = context.run();
    if (context.shouldExit()) return status;  // --list-test-cases and the like
    unsigned passed = Tally::tests - Tally::failed, failed = Tally::failed;
    for (std::FILE* const other : others) {
        unsigned also_passed = 0, also_failed = 1;  // unless the process says so
        for (char line[1000]; std::fgets(line, sizeof line, other);)
            if (std::sscanf(line, "%u passed, %u failed", &also_passed, &also_failed) < 2 &&
                std::strncmp(line, "skipped: ", 9) != 0)  // this process has counted them
                std::fputs(line, stdout);
        status |= pclose(other);
        passed += also_passed;
        failed += also_failed;
    }
    for (const std::string& name : Tally::skipped) std::printf("skipped: %s\n", name.c_str());
    if (passed + failed == 0) std::printf("no test has such a name\n");
    std::printf("%u passed, %u failed, %zu skipped\n", passed, failed, Tally::skipped.size());
    return status || passed + failed == 0;
}
