# Sourced by the scripts beside it.

# Prints a command and its seconds; a command that succeeded once is not run again.
step() {
    step=$1
    shift
    test -e "done/$step" && return
    echo "\$ $*"
    began=$(date +%s)
    "$@"
    echo "($(($(date +%s) - began)) s)"
    mkdir -p done
    touch "done/$step"
}
