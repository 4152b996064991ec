# make train      the program ./train; with the GPU in it where nvcc is found, for the GPU that is found
# make test       every test; the last line is "N passed, N failed, N skipped"
# make sanitize   the same tests, smaller, under AddressSanitizer and UBSan, without the GPU
# make fuzz       random input for every reader of files, a minute each (dev/fuzz; needs clang++)
# make bench      every operator of a step and the whole step, measured on this GPU (dev/bench.cu): a table,
#                 build/bench.json and build/bench.svg
# make build/ladder_adamw   a ladder: a kernel built up step by step (dev/ladders), to be run on a GPU
# make exercise N=3   what the judge says of dev/exercises/03-...: passed, or a hint
# make read       build/read.html: the course beside the code of the CPU, of the GPU and of the tests, as one page
# make figures    draws the figures of the course again, into build/figures/drawn (needs Python's matplotlib)
# make clean      removes what was built
#
# make NVCC= builds the program for the CPU alone, also where nvcc is present. GPU_ARCH=90a chooses another GPU
# than the one in this machine. OPT="-O1 -g" adds what debuggers and profilers need.

CXX  ?= g++
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
O    ?= build
OPT  ?= -O1

# make runs as many jobs as there are cores. A make that another one starts, as in `make sanitize`, shares them.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

# ---------------------------------------------------------------------------------------------------------------
# Flags and sources of the CPU program

# Most of this code waits for files, people or the GPU, so -O1 is enough. The reference has long loops: see below.
# Contraction (a * b + c as one instruction) stays on: without it the GEMMs run at half the speed. The same program
# gives the same bits every time; another compiler or processor may not. -ffast-math stays off, because NaN and
# infinity are part of the method.
CXXFLAGS = -std=c++20 $(OPT) -march=native -fopenmp -fno-math-errno -Wall -Wextra -Werror

REFERENCE := reference.cpp reference_matmul.cpp reference_model.cpp
# All of the program but main(), which the tests replace.
SOURCES   := $(REFERENCE) gpu/layout.cpp $(sort $(filter-out program/main.cpp,$(wildcard program/*.cpp data/*.cpp)))
TESTS     := $(sort $(wildcard test/*.cpp test/*/*.cpp))
JUDGE     := dev/exercises/judge.cpp dev/exercises/capstone.cpp
LINK      := $(CXX) -fopenmp $(OPT)

# ---------------------------------------------------------------------------------------------------------------
# What the GPU adds, where there is an nvcc

ifneq ($(NVCC),)
# The scales of rows and blocks in cuBLASLt begin with CUDA 12.9. An older one is refused before anything is compiled.
CUDA_RELEASE := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
ifneq ($(shell printf '12.9\n$(CUDA_RELEASE)\n' | sort -VC || echo old),)
$(error $(NVCC) is of CUDA $(or $(CUDA_RELEASE),<unknown>), but the GPU code needs CUDA 12.9 or newer: install a newer \
        toolkit, choose another nvcc with NVCC=/path/to/nvcc, or build without the GPU with "make NVCC=")
endif

# The GPU for which the kernels are compiled: the one that nvidia-smi finds. BF16 arithmetic begins with compute
# capability 8.0; where there is no such GPU, the program is built for Hopper, 90a. From 9.0 on, the letter a adds
# instructions of that one generation.
FOUND_ARCH := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1))
GPU_ARCH   ?= $(or $(addsuffix a,$(filter 9% 10% 11% 12%,$(FOUND_ARCH))),$(filter 8%,$(FOUND_ARCH)),90a)

# $(OPT) is for the host's code in these files, which launches kernels; nvcc always optimizes the kernels fully.
NVCCFLAGS := -std=c++20 $(OPT) $(if $(filter -g,$(OPT)),-lineinfo) --split-compile=0 \
             -gencode=arch=compute_$(GPU_ARCH),code=sm_$(GPU_ARCH) -Werror all-warnings \
             -Xcompiler -fopenmp,-Wall,-Wextra,-Werror

# The files that take longest come first, so that all cores work to the end.
SOURCES   := $(sort $(wildcard *.cu gpu/*.cu)) $(filter-out gpu/none.cpp gpu/layout.cpp,$(wildcard gpu/*.cpp)) $(SOURCES)
TESTS     += $(sort $(wildcard test/*.cu test/*/*.cu))
CUDA      := $(abspath $(shell $(NVCC) --dryrun -x c++ -c /dev/null 2>&1 | sed -n 's/.* _HERE_=//p')/..)
LINK      := $(NVCC) -Xcompiler -fopenmp -Xlinker -rpath=$(CUDA)/lib64
LIBRARIES := -Xlinker --as-needed -lcublasLt -ldl
else
SOURCES   += gpu/none.cpp
endif

# ---------------------------------------------------------------------------------------------------------------
# Programs

object  = $(patsubst %,$(O)/%.o,$(1))
OBJECTS := $(call object,$(SOURCES))
PROGRAM := $(if $(filter build,$(O)),train,$(O)/train)

# Headers take most of the time of compiling a test. So the tests of one kind are compiled together: the first
# includes the others. That saves a fifth of the processor time of a build without nvcc.
KINDS     := data dev model reference train
tests_of   = $(sort $(wildcard test/$(1).cpp test/$(1)_*.cpp test/$(1)/*.cpp))
TOGETHER  := $(KINDS:%=$(O)/test/all_%.o)
ALONE     := $(call object,$(filter-out $(foreach kind,$(KINDS),$(call tests_of,$(kind))),$(TESTS)))

.PHONY: test exercise figures read bench sanitize fuzz clean need-number need-nvcc FORCE

$(PROGRAM): $(call object,program/main.cpp) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)

# The order counts: CUDA learns of the kernels in the first files, and then the tests ask, before main(), whether
# the GPU can run them.
$(O)/tests: $(OBJECTS) $(TOGETHER) $(ALONE) $(call object,$(JUDGE))
	$(LINK) -o $@ $^ $(LIBRARIES)

# TEST_ARGS="--test-case='*group*'" chooses tests by name.
test: $(PROGRAM) $(O)/tests
	OMP_WAIT_POLICY=passive COAT_TRAIN=$(abspath $(PROGRAM)) $(O)/tests $(TEST_ARGS)

# BENCH_ARGS="--model gpt2 --recipe bf16" chooses another run than those in the bench's table. Only a whole step
# can be drawn, which --only leaves out.
$(O)/bench: $(call object,dev/bench.cu) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)
bench: $(if $(NVCC),$(O)/bench,need-nvcc)
	$(O)/bench --json $(O)/bench.json $(BENCH_ARGS)
	if grep -q '"step"' $(O)/bench.json; then python3 dev/plot.py bench $(O)/bench.json > $(O)/bench.svg; fi

# A ladder (dev/ladders): make build/ladder_adamw
LADDERS := $(patsubst dev/ladders/%.cu,$(O)/ladder_%,$(wildcard dev/ladders/*.cu))
$(LADDERS): $(O)/ladder_%: $(if $(NVCC),,need-nvcc) $(O)/dev/ladders/%.cu.o $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)

# An exercise needs the reference, but nothing of the GPU implementation.
EXERCISE := $(firstword $(wildcard dev/exercises/$(N)-* dev/exercises/0$(N)-*))
$(O)/exercise_$(N): $(call object,$(EXERCISE) $(JUDGE) reference.cpp reference_matmul.cpp)
	$(LINK) -o $@ $^ $(LIBRARIES)
exercise: $(if $(EXERCISE),$(if $(filter %.cu,$(EXERCISE)),$(if $(NVCC),,need-nvcc)) $(O)/exercise_$(N),need-number)
	@$(O)/exercise_$(N)

read:
	@python3 dev/read.py $(abspath $(O))/read.html
figures: $(PROGRAM)
	@python3 -c 'import matplotlib' 2>/dev/null || { \
	  echo "The figures need Python's matplotlib: apt-get install python3-matplotlib, or pip install matplotlib." >&2; \
	  exit 1; }
	python3 dev/figures.py $(abspath $(PROGRAM)) $(O)/figures
clean:
	rm -rf build train

# ---------------------------------------------------------------------------------------------------------------
# Objects

$(O)/%.cpp.o: %.cpp $(O)/flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@
$(O)/%.cu.o: %.cu $(O)/flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
# The host's part of the GPU code includes CUDA's headers, which nvcc finds.
$(O)/gpu/%.cpp.o: gpu/%.cpp $(O)/flags
	@mkdir -p $(@D)
	$(if $(NVCC),$(NVCC) $(NVCCFLAGS),$(CXX) $(CXXFLAGS)) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

.SECONDEXPANSION:
$(TOGETHER): $(O)/test/all_%.o: $$(call tests_of,$$*) $(O)/flags
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP $(patsubst %,-include %,$(wordlist 2,99,$(call tests_of,$*))) \
	    -c $(firstword $(call tests_of,$*)) -o $@

# The reference on the CPU is where time is spent. These tests read files or start programs, and compute little.
$(call object,$(REFERENCE)): private OPT = -O3
$(patsubst %,$(O)/test/all_%.o,data dev train): private OPT = -O0
# nvcc reads a file twice, for the host and for the device. These files have no kernels: as C++ they are read once,
# which takes 3 seconds each instead of 8.
$(call object,model.cu $(filter-out test/dev/%,$(filter %.cu,$(TESTS)))): private NVCCFLAGS += -x c++
$(O)/dev/ladders/%: NVCCFLAGS += -I.
# An exercise that is half written compiles: its warnings are shown, and the judge says what is wrong.
$(call object,$(wildcard dev/exercises/[0-9]*.cpp)): private CXXFLAGS += -Wno-error
$(call object,$(wildcard dev/exercises/[0-9]*.cu)): private NVCCFLAGS := \
    $(filter-out -Werror all-warnings,$(NVCCFLAGS)) -Xcompiler -Wno-error

# This file changes when the flags do. Every object depends on it, so that a program has no objects of two kinds. A
# fuzzer's objects have their own.
FLAGS = $(CXX) $(CXXFLAGS) $(NVCC) $(NVCCFLAGS)
$(O)/fuzz/flags: private FLAGS = $(FUZZ_CXX)
$(O)/flags $(O)/fuzz/flags: FORCE | $(O)/found/json
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

-include $(shell find $(O) -name '*.d' 2>/dev/null)

# ---------------------------------------------------------------------------------------------------------------
# What is missing, in one sentence instead of a page of errors

# $(call need,header,package). A header that was found once is not looked for again.
need = @echo '\#include <$(1)>' | $(CXX) -E -x c++ - > /dev/null 2>&1 || \
       { echo "The header $(1) is missing: install it, on Debian and Ubuntu with 'apt-get install $(2)'." >&2; exit 1; }
$(O)/found/json:
	$(call need,nlohmann/json.hpp,nlohmann-json3-dev)
	@mkdir -p $(@D) && touch $@
$(O)/found/doctest:
	$(call need,doctest/doctest.h,doctest-dev)
	@mkdir -p $(@D) && touch $@
need-nvcc:
	@echo "This measures or uses a GPU and needs nvcc: install the CUDA toolkit, or give NVCC=/path/to/nvcc." >&2; exit 1
need-number:
	@echo "Which exercise? For example: make exercise N=3" >&2; exit 1
$(TOGETHER) $(ALONE): | $(O)/found/doctest

# ---------------------------------------------------------------------------------------------------------------
# Sanitizers and fuzzers

# With the sanitizers' code in it, GCC finds uninitialized values in std::regex where there are none.
sanitize:
	COAT_QUICK=1 UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test O=build/sanitize NVCC= \
	    OPT="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-maybe-uninitialized"

# An input that fails is left in build/fuzz as crash-...; give it to the fuzzer as its argument to see it fail again.
FUZZERS      := $(patsubst dev/fuzz/%.cpp,%,$(sort $(wildcard dev/fuzz/*.cpp)))
FUZZED       := program/plan.cpp program/processes.cpp gpu/none.cpp gpu/layout.cpp $(sort $(wildcard data/*.cpp))
FUZZED       := $(FUZZED:%.cpp=$(O)/fuzz/%.o)
FUZZ_SECONDS ?= 60
FUZZ_FLAGS   := -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=1024 -timeout=10 -print_funcs=0 \
                -print_final_stats=1 -verbosity=0 -artifact_prefix=$(O)/fuzz/crash-
FUZZ_CXX     ?= clang++ -std=c++20 -O1 -gline-tables-only -march=native -fno-sanitize-recover=all \
                -fsanitize=fuzzer,address,signed-integer-overflow,shift,bounds,integer-divide-by-zero
$(O)/fuzz/%.o: %.cpp $(O)/fuzz/flags
	@mkdir -p $(@D)
	$(FUZZ_CXX) -MMD -MP -c $< -o $@
$(O)/fuzz/fuzz_%: $(O)/fuzz/dev/fuzz/%.o $(FUZZED)
	$(FUZZ_CXX) $^ -lgomp -o $@
.SECONDARY: $(FUZZERS:%=$(O)/fuzz/dev/fuzz/%.o) $(FUZZED)  # objects stay for the next time
fuzz: $(FUZZERS:%=$(O)/fuzz/fuzz_%)
	@for target in $(FUZZERS); do \
	    mkdir -p $(O)/fuzz/corpus_$$target; \
	    $(O)/fuzz/fuzz_$$target $(FUZZ_FLAGS) $(O)/fuzz/corpus_$$target dev/fuzz/seeds/$$target || exit 1; \
	done
