/* Linked with a library that is nowhere when it runs: as a library to preload, and as a program. */
int main(void)
{
    return 0;
}
