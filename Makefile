# make train      the program ./train; with the GPU in it where nvcc is found, for the GPU that is found
# make test       every test; the last line is "N passed, N failed, N skipped"
# make sanitize   the same tests, smaller, under AddressSanitizer and UBSan, without the GPU; SANITIZE=thread chooses
#                 ThreadSanitizer (for which tests, test/README.md says)
# make bench      every operator of a step and the whole step, measured on this GPU (dev/bench.cu): a table,
#                 build/bench.json and build/bench.svg
# make build/ladder_adamw   a ladder: a kernel built up step by step (dev/ladders), to be run on a GPU
# make exercise N=3   what the judge says of dev/exercises/03-...; HINT=1 adds a hint
# make read       build/read.html: the course beside the code of the CPU, of the GPU and of the tests, as one page
# make figures    draws the figures of the course again, into build/figures/drawn (needs Python's matplotlib)
# make clean      removes what was built
#
# make NVCC= builds the program for the CPU alone, also where nvcc is present. GPU_ARCH=90a chooses another GPU
# than the one in this machine. OPT="-O1 -g" adds what debuggers and profilers need.

CXX  ?= g++
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
NVCC := $(NVCC)# it is looked for once, not at every use
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
CXXFLAGS = -std=c++20 $(OPT) -march=native -fopenmp -fno-math-errno -Wall -Wextra $(WERROR)
WERROR  := -Werror

REFERENCE := reference.cpp reference_matmul.cpp reference_model.cpp
# All of the program but main(), which the tests replace.
SOURCES   := $(REFERENCE) gpu/layout.cpp $(sort $(filter-out program/main.cpp,$(wildcard program/*.cpp data/*.cpp)))
TESTS     := $(sort $(wildcard test/*.cpp test/*/*.cpp))
JUDGE     := $(wildcard dev/exercises/judge_*.cpp) dev/exercises/capstone.cpp
LINK      := $(CXX) -fopenmp $(OPT)

# ---------------------------------------------------------------------------------------------------------------
# What the GPU adds, where there is an nvcc

ifneq ($(NVCC),)
# $(OPT) is for the host's code in .cu files, which launches kernels; nvcc always optimizes the kernels fully. The
# GPU for which they are compiled stands in the file $(O)/gpu_arch, as a word such as 90a (its rule is below).
NVCCFLAGS  = -std=c++20 $(OPT) $(if $(filter -g,$(OPT)),-lineinfo) --split-compile=0 $(GENCODE) \
             $(WERROR:%=% all-warnings) -Xcompiler -fopenmp,-Wall,-Wextra$(WERROR:%=,%)
GENCODE    = -gencode=arch=compute_$(file < $(O)/gpu_arch),code=sm_$(file < $(O)/gpu_arch)

# The host's part of the GPU code, which includes CUDA's headers.
CUDA_HOST := $(filter-out gpu/none.cpp gpu/layout.cpp,$(wildcard gpu/*.cpp))
# The files that take longest come first, so that all cores work to the end.
SOURCES   := $(sort $(wildcard *.cu gpu/*.cu)) $(CUDA_HOST) $(SOURCES)
TESTS     += $(sort $(wildcard test/*.cu test/*/*.cu))
# The folder of CUDA, as nvcc itself names it: $(NVCC) may be a link or a script. A program looks there for libraries.
CUDA       = $(abspath $(shell $(NVCC) --dryrun -x c++ -c /dev/null 2>&1 | sed -n 's/.* _HERE_=//p')/..)
LINK       = $(NVCC) -Xcompiler -fopenmp -Xlinker -rpath=$(CUDA)/lib64
LIBRARIES := -Xlinker --as-needed -lcublasLt -ldl
else
SOURCES   += gpu/none.cpp
endif

# ---------------------------------------------------------------------------------------------------------------
# Programs

object  = $(patsubst %,$(O)/%.o,$(1))
OBJECTS := $(call object,$(SOURCES))
PROGRAM := $(if $(filter build,$(O)),train,$(O)/train)

.PHONY: test exercise figures read bench sanitize clean need-number FORCE

$(PROGRAM): $(call object,program/main.cpp) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)

# The order counts: CUDA learns of the kernels in the first files, and then the tests ask, before main(), whether
# the GPU can run them.
$(O)/tests: $(OBJECTS) $(call object,$(TESTS) $(JUDGE))
	$(LINK) -o $@ $^ $(LIBRARIES)

# TEST_ARGS="--test-case='*group*'" chooses tests by name.
test: $(PROGRAM) $(O)/tests
	OMP_WAIT_POLICY=passive COAT_TRAIN=$(abspath $(PROGRAM)) $(O)/tests $(TEST_ARGS)

# BENCH_ARGS="--model gpt2 --recipe bf16" chooses another run than those in the bench's table. Only a whole step
# can be drawn, which --only leaves out.
$(O)/bench: $(call object,dev/bench.cu) $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)
bench: $(O)/bench
	$(O)/bench --json $(O)/bench.json $(BENCH_ARGS)
	$(if $(filter --only,$(BENCH_ARGS)),,python3 dev/plot.py bench $(O)/bench.json > $(O)/bench.svg)

# A ladder (dev/ladders): make build/ladder_adamw
LADDERS := $(patsubst dev/ladders/%.cu,$(O)/ladder_%,$(wildcard dev/ladders/*.cu))
$(LADDERS): $(O)/ladder_%: $(O)/dev/ladders/%.cu.o $(OBJECTS)
	$(LINK) -o $@ $^ $(LIBRARIES)

# An exercise needs the reference, but nothing of the GPU implementation.
EXERCISE := $(firstword $(wildcard dev/exercises/$(N)-* dev/exercises/0$(N)-*))
$(O)/exercise_$(N): $(call object,$(EXERCISE) $(JUDGE) reference.cpp reference_matmul.cpp)
	$(LINK) -o $@ $^ $(LIBRARIES)
exercise: $(if $(EXERCISE),$(O)/exercise_$(N),need-number)
	@$(O)/exercise_$(N)

read:
	@python3 dev/read.py $(abspath $(O))/read.html
figures: $(PROGRAM)
	@python3 -c 'import matplotlib' 2>/dev/null || { \
	  echo "The figures need Python's matplotlib: apt-get install python3-matplotlib, or pip install matplotlib." >&2; \
	  exit 1; }
	python3 dev/figures.py $(abspath $(PROGRAM))
clean:
	rm -rf $(O) $(PROGRAM)

# ---------------------------------------------------------------------------------------------------------------
# Objects

# Every object depends on this Makefile, and on files with what the command line and the machine decide: settings,
# and for kernels gpu_arch. So a change of any of them compiles again what it concerns, and no program has objects
# of two kinds.
$(O)/%.cpp.o: %.cpp Makefile $(O)/settings
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@
$(O)/%.cu.o: %.cu Makefile $(O)/settings $(O)/gpu_arch
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(call object,$(CUDA_HOST)): $(O)/%.o: % Makefile $(O)/settings $(O)/gpu_arch
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

# The reference on the CPU is where time is spent.
$(call object,$(REFERENCE)): private OPT = -O3
# These tests read files or start programs, and compute little.
$(call object,$(wildcard test/data/*.cpp test/dev/*.cpp test/train_*.cpp)): private OPT = -O0
# nvcc reads a file twice, for the host and for the device. model.cu and the tests have no kernels: as C++ they are
# read once, which takes 3 seconds each instead of 8.
$(call object,model.cu $(filter-out test/dev/%,$(filter %.cu,$(TESTS)))): private NVCCFLAGS += -x c++
# An exercise that is half written compiles: its warnings are shown, and the judge says what is wrong.
$(call object,$(wildcard dev/exercises/[0-9]*)): private override WERROR :=

# $(call renew,lines) writes the target if it does not consist of these lines already. So the target's time changes
# only when its lines do.
renew = @mkdir -p $(@D); printf '%s\n' $(1) | cmp -s - $@ || printf '%s\n' $(1) > $@
# COMPILER is a checksum of what the compiler says of its version and of the instructions that -march=native allows.
COMPILER = $(shell $(CXX) -march=native -E -v -x c++ - < /dev/null 2>&1 | cksum | cut -d ' ' -f 1)
CUDA_RELEASE = $(if $(NVCC),$(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'))
$(O)/settings: FORCE | $(O)/found/json
	$(call renew,'CXX=$(CXX)' 'COMPILER=$(COMPILER)' 'OPT=$(OPT)' 'WERROR=$(WERROR)' 'NVCC=$(NVCC)' \
	             'CUDA_RELEASE=$(CUDA_RELEASE)')

# The GPU for which kernels are compiled: the one that nvidia-smi finds, which is asked once, and again when the
# settings change. BF16 arithmetic begins with compute capability 8.0; where there is no such GPU, it is Hopper, 90a.
# From 9.0 on, the letter a adds instructions of that one generation. The scales of rows and blocks in cuBLASLt begin
# with CUDA 12.9.
$(O)/found/gpu: $(O)/settings
	@mkdir -p $(@D)
	@nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d . > $@
arch_of   = $(or $(addsuffix a,$(filter 9% 10% 11% 12%,$(1))),$(filter 8%,$(1)),90a)
GPU_ARCH ?= $(call arch_of,$(file < $(O)/found/gpu))
$(O)/gpu_arch: $(O)/found/gpu FORCE
	@printf '12.9\n%s\n' '$(CUDA_RELEASE)' | sort -VC || { \
	  echo "This needs nvcc of CUDA 12.9 or newer, and there is $(if $(NVCC),$(NVCC) of CUDA $(CUDA_RELEASE),none):" \
	       "install the CUDA toolkit, or choose another nvcc with NVCC=/path/to/nvcc. \"make NVCC= train\" builds" \
	       "the program without the GPU." >&2; exit 1; }
	$(call renew,$(GPU_ARCH))

# Beside each object lies a file that names the headers which its source includes.
FILES := $(wildcard *.cpp *.cu */*.cpp */*.cu */*/*.cpp */*/*.cu)
-include $(FILES:%=$(O)/%.d)

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
need-number:
	@echo "Which exercise? For example: make exercise N=3" >&2; exit 1
$(call object,$(TESTS)): | $(O)/found/doctest

# ---------------------------------------------------------------------------------------------------------------
# Sanitizers

# With the sanitizers' code in it, GCC finds uninitialized values in std::regex where there are none.
SANITIZE ?= address,undefined
sanitize:
	COAT_QUICK=1 UBSAN_OPTIONS=print_stacktrace=1 $(MAKE) --no-print-directory test O=build/sanitize-$(SANITIZE) \
	    NVCC= OPT="-O1 -g -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -Wno-maybe-uninitialized"
