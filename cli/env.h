/* cli/env.h - the environment of a job as a command is given it: a runtime_env, and what goes along from here */
#pragma once
#include <jansson.h>

#include "common/base/base.h"

/* A runtime_env: text (JSON) or file (JSON, or YAML where this build has libyaml); both NULL: {}.
 *
 * FL_INVALID  both are given, or what is wrong, with the line and column of it */
enum fl_status cli_env_read(const char *text, const char *file, json_t **out, struct fl_err *err);
/* What the head would refuse anyway, said before anything is sent: unknown members, values of another type. */
enum fl_status cli_env_check(const json_t *env, struct fl_err *err);

/* A job runs elsewhere: of the variables of this process those go along that programs of a run read, and no others.
 * They are put into env_vars unless it names them.
 *
 * Taken by name's beginning (CLI_PASS_PREFIXES) and the proxies; never those that are a node's own (its devices,
 * interfaces and addresses). more: names that go along besides, comma between.
 * FL_INVALID: one of more is no name, or is not set here */
enum fl_status cli_env_pass(json_t *env, const char *more, struct fl_err *err);
#define CLI_PASS_PREFIXES "NCCL_ GLOO_ UCX_ TORCH_ TORCHINDUCTOR_ PYTORCH_ SGLANG_ VLLM_ HF_ TRANSFORMERS_ TOKENIZERS_ WANDB_ OMP_ MKL_"

/* ==== env_yaml.c, or env_yaml_none.c ================================================================ */
/* The one document of text as JSON; what names it in errors. FL_UNSUPPORTED: this build reads JSON alone. */
enum fl_status cli_yaml_parse(const char *text, size_t len, const char *what, json_t **out, struct fl_err *err);
