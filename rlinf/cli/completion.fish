# Completion of rlinf: passes it the line up to the cursor. If it prints nothing, the shell completes file names itself.
complete -c rlinf -n 'test -n "$(rlinf --complete "$(commandline -cp)" 2>/dev/null)"' -f \
  -a '(rlinf --complete "$(commandline -cp)" 2>/dev/null)'
