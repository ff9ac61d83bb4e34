#include "common/gpu/probe.h"

int main(int argc, char **argv)
{
    return gpu_probe_main(argc, argv);
}
