def pytest_addoption(parser):
    parser.addoption(
        "--all-configs",
        action="store_true",
        help="compile the kernels in every configuration, not the common ones alone",
    )
