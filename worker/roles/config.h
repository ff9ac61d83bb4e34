/* worker/roles/config.h - the model that the flags of a run describe */
#pragma once
#include "common/conf/train_flags.h"
#include "worker/roles/model.h"

/* As given, unchecked: model_config_check(). */
struct model_config model_config_of_flags(const struct train_flags *f, uint32_t vocab);
