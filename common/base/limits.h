/* common/base/limits.h - bounds that two sides must agree on */
#pragma once

enum { FL_PACKAGE_MAX_BYTES = 100 << 20 }; /* of one package: what Ray's HTTP side takes */
