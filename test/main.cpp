// main.cpp - runs every test. The last line is for scripts and people: "N passed, N failed, N skipped".
//
// A test is skipped only by its own decorator (doctest::skip), as GPU tests are where there is no GPU.
// Skipped tests are listed by name.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
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
        tests = run.numTestCasesPassingFilters, failed = run.numTestCasesFailed;
    }
};
REGISTER_REPORTER("tally", 0, Tally);

}  // namespace

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    context.addFilter("reporters", "tally");
    const int status = context.run();
    if (context.shouldExit()) return status;  // --list-test-cases and the like
    for (const std::string& name : Tally::skipped) std::printf("skipped: %s\n", name.c_str());
    if (Tally::tests == 0) std::printf("no test has such a name\n");
    std::printf("%u passed, %u failed, %zu skipped\n", Tally::tests - Tally::failed, Tally::failed,
                Tally::skipped.size());
    return status || Tally::tests == 0;
}
