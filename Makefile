# Everything a newcomer needs. The work is done by the scripts; `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build image demo serve test test-api test-python test-sdk test-browser test-kvm bench bench-kvm lint fuzz clean doctor screenshots man

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the Debian packages that are missing
	@scripts/setup

build: ## build build/ephemeral and build/guestagent
	@scripts/build

image: setup build ## build the image that machines boot from (kept)
	@scripts/image

demo: ## run one request from start to end, and clean up
	@scripts/demo

serve: ## start a server to keep on loopback
	@scripts/serve

doctor: ## check whether this host can run machines
	@scripts/doctor

test: ## run every check and test, on real machines and a real Redis
	@scripts/test

test-python: ## test the Python client against a server of its own (a part of make test)
	@scripts/test-python

test-api: ## fuzz the HTTP API of a live server from its description, and load it
	@scripts/test-api

test-sdk: ## run the OpenAI SDK for Python, from PyPI, in a machine
	@scripts/test-sdk

test-browser: ## test the pages in a browser (a part of make test; pictures in build/screens)
	@scripts/test-browser

screenshots: ## make the README's picture of the timeline from a real run
	@scripts/screenshots

man: build ## write the manual pages to build/man
	@build/ephemeral man build/man

test-kvm: ## test every hypervisor on real KVM, in an emulated machine where this host has none
	@scripts/test-kvm

bench: ## measure, and compare with bare QEMU (build/bench.json)
	@scripts/bench

bench-kvm: ## measure Cloud Hypervisor's machines on real KVM, beside bare ones (build/bench-kvm.json)
	@scripts/bench-kvm

chaos: ## kill, stop and cut off whatever can be, for long (SEED=, ROUNDS=)
	@scripts/chaos

lint: ## gofmt, go vet, staticcheck
	@scripts/lint

fuzz: ## fuzz every fuzz target for FUZZTIME each (default 30s)
	@scripts/fuzz

clean: ## remove build/
	@scripts/clean
