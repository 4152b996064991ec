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

struct Tally : doctest::IReporter {
    inline static int passed = 0, failed = 0;
    inline static std::vector<std::string> skipped;

    explicit Tally(const doctest::ContextOptions&) {}
    void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
        (stats.failure_flags ? failed : passed)++;
    }
    void test_case_skipped(const doctest::TestCaseData& test) override {
        if (test.m_skip) skipped.push_back(test.m_name);  // others were filtered out by the command line
    }

    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_start(const doctest::TestCaseData&) override {}
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
};
REGISTER_LISTENER("tally", 1, Tally);

}  // namespace

int main(int argc, char** argv) {
    doctest::Context context(argc, argv);
    const int status = context.run();
    if (context.shouldExit()) return status;  // --list-test-cases and the like
    for (const std::string& name : Tally::skipped) std::printf("skipped: %s\n", name.c_str());
    if (Tally::passed + Tally::failed == 0) std::printf("no test has such a name\n");
    std::printf("%d passed, %d failed, %zu skipped\n", Tally::passed, Tally::failed, Tally::skipped.size());
    return status || Tally::passed + Tally::failed == 0;
}
