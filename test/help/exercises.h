// exercises.h - what the judge of dev/exercises says of an empty body, of mistakes, and of a solution.
#pragma once
#include <iostream>

#include "../../dev/exercises/judge.h"
#include "files.h"

namespace coat::test {

inline void says(const std::string& sentence, const std::function<int()>& judge) {
    std::ostringstream out;
    std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
    const int code = judge();
    std::cout.rdbuf(before);
    CHECK(code == !contains(sentence, "passed, "));
    CHECK_MESSAGE(contains(out.str(), sentence), out.str());
}

// rows: what the judge says, and of which mistake
template <class Judge, class F, class Solution>
void exercise(const Judge& judge, F* body, const Solution& solution,
              const std::vector<std::pair<const char*, std::function<F>>>& rows) {
    says("passed, ", [&] { return judge(solution); });
    if (!exercises_are_solved()) says("nothing is computed yet: write the body", [&] { return judge(body); });
    for (const auto& [sentence, mine] : rows) says(sentence, [&, &f = mine] { return judge(f); });
}

}  // namespace coat::test
