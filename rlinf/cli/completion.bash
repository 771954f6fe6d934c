# Completion of rlinf: asks it with the line up to the cursor. No answer leaves the shell's own completion of files.
_rlinf() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\n'
  local word="${line##* }"
  local kept="${word%"${word##*[$COMP_WORDBREAKS]}"}"  # readline replaces what follows the last "=" alone
  COMPREPLY=($("$1" --complete "$line" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"$kept"}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _rlinf rlinf
