// main.cpp - runs every test. The last line is for scripts and people: "N passed, N failed, N skipped".
//
// A test is skipped only by its own decorator (doctest::skip), as GPU tests are where there is no GPU.
// Skipped tests are listed by name. Where all tests run, a second process has those that start programs and
// mostly wait for them. None of these uses a GPU.
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

int main(int argc, char** argv) {
    const std::string waiting = "*test/train_*,*test/ranks.cpp,*test/data/*,*test/dev/*.cpp";
    std::FILE* second = nullptr;
    doctest::Context context(argc, argv);
    context.addFilter("reporters", "tally");
    if (argc == 1) {  // each process has half of the cores
        omp_set_num_threads((omp_get_num_procs() + 1) / 2);
        const std::string command = "OMP_NUM_THREADS=" + std::to_string(omp_get_max_threads()) + " '" +
                                    argv[0] + "' '--source-file=" + waiting + "'";
        second = popen(command.c_str(), "r");
        context.addFilter("source-file-exclude", waiting.c_str());
    }
    int status = context.run();
    if (context.shouldExit()) return status;  // --list-test-cases and the like
    unsigned passed = Tally::tests - Tally::failed, failed = Tally::failed;
    unsigned also_passed = 0, also_failed = 1;  // unless the second process says so
    for (char line[1000]; second && std::fgets(line, sizeof line, second);)
        if (std::sscanf(line, "%u passed, %u failed", &also_passed, &also_failed) < 2 &&
            std::strncmp(line, "skipped: ", 9) != 0)  // this process has counted them
            std::fputs(line, stdout);
    if (second) {
        status |= pclose(second);
        passed += also_passed;
        failed += also_failed;
    }
    for (const std::string& name : Tally::skipped) std::printf("skipped: %s\n", name.c_str());
    if (passed + failed == 0) std::printf("no test has such a name\n");
    std::printf("%u passed, %u failed, %zu skipped\n", passed, failed, Tally::skipped.size());
    return status || passed + failed == 0;
}
