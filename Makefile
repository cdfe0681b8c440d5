# Every command that developers and CI run. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
# Prerequisites must run in the order listed, and cargo already uses all processors.
.NOTPARALLEL:

# Anything slow is built once per machine, outside the checkout. Cargo cannot distinguish two checkouts that share a target folder, so
# each checkout has its own; other caches are keyed by version.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/openfilter-pipelines
CHECKOUT := $(shell pwd -P | sha256sum | cut -c1-12)
export CARGO_TARGET_DIR ?= $(CACHE)/target-$(CHECKOUT)
# A failure's line number is enough; a backtrace's thirty runtime frames hide everything else.
export RUST_BACKTRACE := 0
# A clean clone gains nothing from incremental builds, which take up a third of the target folder.
ifdef CI
export CARGO_INCREMENTAL := 0
endif

# Builds a program of the workspace and expands to its path. Naming a suite selects the suites' features, so that nothing is compiled
# twice.
program = cargo build --quiet --workspace --locked --bin $(1) --test $(2); "$$CARGO_TARGET_DIR/debug/$(1)"
TESTBED = $(call program,testbed,down)

CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := $(CACHE)/cargo-deny-$(CARGO_DENY_VERSION)

PACKAGES := build-essential ca-certificates cmake curl git python3 util-linux valkey-server redis-server

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# cargo reports its progress only for the first, long build.
.PHONY: demo
demo: packages room ## watch a pipeline run on a cluster on this machine; DOWN=1 removes everything
	@if [ -x "$$CARGO_TARGET_DIR/debug/demo" ]; then quiet=--quiet; else
	  echo "building the demo first: about 4 minutes, once per checkout"
	  quiet=
	fi
	cargo build $$quiet --workspace --locked --bin demo --test demo
	"$$CARGO_TARGET_DIR/debug/demo" $(if $(DOWN),--down)

# Runs a suite; `make test` and `make test-gitops` end with a table of each suite's seconds.
SUITE := tools/suite.sh

.PHONY: test
test: ## run all suites except those of test-gitops
	@$(SUITE) --all $(MAKE) --no-print-directory packages lint deny test-machine test-cluster

.PHONY: test-machine
test-machine: packages room ## run the suites that need no cluster (part of `make test`)
	$(SUITE) build cargo test --workspace --locked --no-run
	$(SUITE) --each machine cargo test --workspace --locked

# The cluster is started first, outside the tests, so that the progress of a long first build is visible.
.PHONY: test-cluster
test-cluster: packages room ## run the suites that need a real Kubernetes (part of `make test`)
	$(TESTBED) down # also removes what a killed test left behind
	$(SUITE) 'start of the cluster' "$$CARGO_TARGET_DIR/debug/testbed" up --nodes 2
	trap '"$$CARGO_TARGET_DIR/debug/testbed" down' EXIT
	$(SUITE) cluster cargo test --workspace --locked --test cluster -- --ignored
	$(SUITE) api cargo test --workspace --locked --test api -- --ignored
	$(SUITE) run cargo test --workspace --locked --test run -- --ignored --test-threads 4
	$(SUITE) operator cargo test --workspace --locked --test operator -- --ignored
	$(SUITE) webhook cargo test --workspace --locked --test webhook -- --ignored --test-threads 1
	$(SUITE) deploy cargo test --workspace --locked --test deploy -- --ignored
	$(SUITE) demo cargo test --workspace --locked --test demo -- --ignored
	$(SUITE) getting-started cargo test --workspace --locked --test getting_started -- --ignored --nocapture
	$(SUITE) down cargo test --workspace --locked --test down -- --ignored --nocapture
	$(SUITE) readme cargo test --workspace --locked --test readme -- --ignored --nocapture

# The first run on a machine also builds both engines, which takes half an hour on two cores.
.PHONY: test-gitops
test-gitops: ## let a real Argo CD and a real Flux install the operator and apply a repository
	@$(SUITE) --all $(MAKE) --no-print-directory test-engines

.PHONY: test-engines
test-engines: packages room
	$(TESTBED) down
	$(SUITE) 'start of the cluster' "$$CARGO_TARGET_DIR/debug/testbed" up --nodes 2
	trap '"$$CARGO_TARGET_DIR/debug/testbed" down' EXIT
	$(SUITE) gitops cargo test --workspace --locked --test gitops -- --ignored --test-threads 1 --nocapture

.PHONY: test-fast
test-fast: packages room lint ## run lint and test-machine with fewer random histories, while you edit
	HISTORIES=100 cargo test --workspace --locked

.PHONY: lint
lint: room ## check formatting and run clippy; warnings are errors
	$(SUITE) fmt cargo fmt --all --check
	$(SUITE) clippy cargo clippy --workspace --all-targets --locked -- -D warnings

.PHONY: deny
deny: $(CARGO_DENY)/bin/cargo-deny ## check the licences and sources of dependencies, and that banned ones stay out
	cargo fetch --locked
	$(SUITE) deny $< --offline check --hide-inclusion-graph bans licenses sources

# Installed into a separate folder and renamed at the end, so that a half-built one is never used. The lock is needed because all checkouts
# on the machine share that folder.
$(CARGO_DENY)/bin/cargo-deny:
	@mkdir -p '$(CACHE)'
	exec 9>'$(CARGO_DENY).lock'
	flock 9
	if [ -x '$@' ]; then exit; fi # another checkout has built it while this one waited
	echo "building cargo-deny $(CARGO_DENY_VERSION), about 2 minutes, once per machine"
	rm -rf '$(CARGO_DENY).part'
	# An optimized build would take twice as long, and cargo-deny has little to do.
	env -u CARGO_TARGET_DIR cargo install --debug --quiet --locked --root '$(CARGO_DENY).part' cargo-deny@$(CARGO_DENY_VERSION)
	rm -rf '$(CARGO_DENY)'
	mv '$(CARGO_DENY).part' '$(CARGO_DENY)'

.PHONY: gen
gen: room ## regenerate the files that come from the code: CRDs, RBAC, docs/{rules,rbac,metrics,settings}.md
	$(call program,gen,generated)

.PHONY: bench
bench: packages room ## measure performance, and compare it with what the machine can do
	cargo bench --workspace --locked --bench queue --bench listing --bench claimer --bench webhook --bench spawn
	$(TESTBED) down # `up` would reuse a running cluster that has no fake nodes
	"$$CARGO_TARGET_DIR/debug/testbed" up --nodes 2 --kwok 10
	trap '"$$CARGO_TARGET_DIR/debug/testbed" down' EXIT
	ulimit -Sn "$$(ulimit -Hn)" # each of 500 played Warm pods has two connections
	cargo bench --workspace --locked --bench run --bench admission

# The same tests as in CI, with larger sizes and longer times.
.PHONY: soak
soak: packages room ## run CI's outages at full size (30 minutes): no storage for 5 minutes, no operator for 10, 200,000 failing files
	$(TESTBED) down
	"$$CARGO_TARGET_DIR/debug/testbed" up --nodes 2
	trap '"$$CARGO_TARGET_DIR/debug/testbed" down' EXIT
	SOAK=1 cargo test --workspace --locked --test run -- --ignored --nocapture --test-threads 1 \
	  an_outage_of_the_storage a_large_bucket_of_which_every_file_fails without_an_operator_a_hundred_warm_pods

.PHONY: fuzz
fuzz: packages room ## send the webhook a million mutated reviews (2 minutes; REVIEWS=n changes the number)
	REVIEWS=$(or $(REVIEWS),1000000) cargo test --profile bench --workspace --locked --test webhook -- mutated_reviews --nocapture

.PHONY: cluster-up
cluster-up: packages room ## start a real Kubernetes on this machine: NODES=n real nodes (default 1), KWOK=n fake nodes (default 0)
	@$(TESTBED) up --nodes $(or $(NODES),1) --kwok $(or $(KWOK),0)

.PHONY: cluster-down
cluster-down: room ## stop the cluster and remove every trace of it
	@$(TESTBED) down --any

.PHONY: images
images: packages room ## build the container images, and load them into the cluster if it is up
	@$(TESTBED) images

.PHONY: engines
engines: packages room ## build Argo CD and Flux ahead of `make test-gitops` (half an hour, once per machine)
	@$(TESTBED) engines

.PHONY: packages
packages: ## install missing Debian packages (needs root)
	@tools/packages.sh $(PACKAGES)

.PHONY: room
room:
	@tools/room.sh '$(CACHE)' "$$CARGO_TARGET_DIR"
